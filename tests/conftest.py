"""What many tests need: databases (SQLite, and one real PostgreSQL for all of them) and the service in process."""

from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import numpy as np
import psycopg
import pytest
from starlette.testclient import TestClient

from app.main import create_app
from app.service import Service
from roadmatch.blobs import FolderBlobs
from roadmatch.gallery import galleries
from roadmatch.gallery.galleries import Gallery, Keep
from roadmatch.gallery.items import GalleryStore, NewImage
from roadmatch.store.database import Database, open_database
from tests.bundles import tiny_bundle
from tests.postgres import PostgresServer
from tests.service import open_here


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """One server for the session, started by the first test that asks for it."""
    server = PostgresServer()
    yield server
    server.close()


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """The URL of an SQLite file that is not there yet."""
    return f"sqlite:///{tmp_path / 'roadmatch.db'}"


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """The URL of an empty PostgreSQL database; emptied afterwards, which takes a tenth of the time of a new one."""
    yield postgres_server.url()
    with psycopg.connect(postgres_server.url(), autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'roadmatch'"
        )
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest) -> str:
    """The URL of an empty database, of either kind in turn."""
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """An open database of either kind."""
    database = open_database(database_url)
    yield database
    database.close()


@pytest.fixture
def store(database: Database, tmp_path: Path) -> GalleryStore:
    """A database of either kind with a folder for pictures."""
    return GalleryStore(database, FolderBlobs(tmp_path / "blobs"))


@pytest.fixture
def gallery(store: GalleryStore) -> Gallery:
    """An empty gallery that keeps its pictures."""
    return galleries.create(store.database, "birds", bundle="small@0123456789ab", rule="max_f1", keep=Keep.ORIGINAL)


@pytest.fixture
def make_image() -> Callable[[object], NewImage]:
    """A maker of images to be stored: the same name gives the same image, with a unit vector of 8 numbers."""

    def make(name: object) -> NewImage:
        data = f"picture of {name}".encode()
        vector = np.random.default_rng(list(data)).normal(size=8).astype(np.float32)
        return NewImage(data, sha256(data).hexdigest(), "PNG", 32, 16, vector / np.linalg.norm(vector), 0.25)

    return make


# The service in process, on a tiny bundle


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny calibrated bundle."""
    return tiny_bundle(tmp_path_factory.mktemp("bundle") / "tiny").folder


@pytest.fixture(scope="module")
def service(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Service:
    """A service of its own for each module."""
    return open_here(tmp_path_factory.mktemp("data"), bundle)


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[TestClient]:
    """What asks it over HTTP."""
    with TestClient(create_app(service)) as client:
        yield client
