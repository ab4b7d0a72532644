"""The application: routes, the gate before them, and the process that serves it."""

import ctypes
import gc
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache, partial
from importlib.metadata import version
from types import FrameType

import uvicorn
from fastapi import FastAPI
from fastapi_offline import FastAPIOffline
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp

from app import problems
from app.connections import connections
from app.forms import KNOWN_QUERY
from app.gate import Gate
from app.openapi import document, operation_id
from app.routes import galleries, imports, items, jobs, operations, search
from app.service import Service, open_service
from app.settings import Settings, SettingsError
from roadmatch.gallery.items import MOST_IMAGES

_M_MMAP_THRESHOLD = -3
_UPLOADS = 4
"""Archives that are received at a time; they do not take the places of searches."""
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_DESCRIPTION = "Is this picture in my gallery, and where? One calibrated threshold serves every query."


def create_app(service: Service, hosts: frozenset[str] = frozenset()) -> ASGIApp:
    """The service over HTTP, asked by one of these names; none: by any."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPIOffline(  # the documentation page comes from here and not from other people's servers
        title="Roadmatch",
        description=_DESCRIPTION,
        version=version("roadmatch"),
        lifespan=lifespan,
        dependencies=[KNOWN_QUERY],
        generate_unique_id_function=operation_id,
        redoc_url=None,
        swagger_ui_oauth2_redirect_url="/docs/oauth2-redirect",
        redirect_slashes=False,
        max_body_size=service.settings.body_mb * 1_000_000,
        form_limits={"max_files": MOST_IMAGES + 1, "max_fields": 16, "max_part_size": 65_536},
    )
    app.state.service = service
    problems.install(app)
    app.add_api_route("/", _to_documentation, include_in_schema=False)
    for routes in (
        search,
        galleries,
        items,
        imports,
        jobs,
        operations,
    ):  # tried in this order, so searches find theirs first
        app.include_router(routes.router)
    app.include_router(imports.archives(service.settings.import_mb * 1_000_000))
    app.openapi = cache(partial(document, app, service))  # type: ignore[method-assign]
    places = service.settings.threads + service.settings.queue
    return Gate(
        app,
        places=places,
        receive_s=service.settings.receive_s,
        metrics=service.metrics,
        hosts=hosts,
        is_upload=imports.is_upload,
        upload_places=_UPLOADS,
    )


async def _to_documentation() -> RedirectResponse:
    """A person who opens the printed address sees what can be asked."""
    return RedirectResponse("/docs")


class _Server(uvicorn.Server):
    """Tells the service that it is stopping before it stops."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal to stop: readyz says so, requests in flight are finished."""
        self._service.stopping = True
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and print the address for whoever started the service."""
        await super().startup(sockets)
        for server in self.servers:
            host, port = server.sockets[0].getsockname()[:2]
            print(f"roadmatch: ready at http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)  # noqa: T201


def serve(settings: Settings) -> int:
    """Run until SIGTERM or SIGINT -> exit status. Raises RoadmatchError, OSError where the service cannot start."""
    if settings.host not in _LOOPBACK and not settings.allow_open:
        raise SettingsError(
            f"{settings.host} can be reached by others and nothing protects the service yet: "
            "keep ROADMATCH_HOST=127.0.0.1 behind a proxy of yours, or set ROADMATCH_ALLOW_OPEN=1"
        )
    os.umask(0o077)  # the database and the pictures are for nobody else on this machine
    # glibc keeps what threads free after large pictures, for good: blocks of 4 MB and more go straight back.
    getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)(_M_MMAP_THRESHOLD, 4 << 20)
    sys.setswitchinterval(0.0001)  # 5 ms is how long the event loop would wait for a thread that computes in Python
    with _bound(settings) as listener:
        service = open_service(settings)
        app = create_app(service, _names(settings))
        gc.collect()
        gc.freeze()  # what is here now stays: later collections need not go through it
        config = uvicorn.Config(
            app,
            http=connections(settings.receive_s),
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=settings.shutdown_s,
            lifespan="on",
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # uvicorn raises it again in the end: being stopped is no failure
        _Server(config, service).run([listener])
    return 0


def _names(settings: Settings) -> frozenset[str]:
    """The names by which the service may be asked: the set ones, and on this machine alone its own."""
    given = {name.strip().lower() for name in settings.hosts.split(",") if name.strip()}
    return frozenset({*given, *_LOOPBACK}) if given or settings.host in _LOOPBACK else frozenset()


def _bound(settings: Settings) -> socket.socket:
    """The address, taken before anything is loaded; nobody can connect before the server listens.

    Raises SettingsError.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in settings.host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise SettingsError(
            f"{settings.host} port {settings.port} cannot be listened on ({error.strerror}): "
            "give another with --host and --port (ROADMATCH_HOST, ROADMATCH_PORT)"
        ) from error
    return listener
