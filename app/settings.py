"""The service's settings: ROADMATCH_* variables, read once."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from roadmatch.blobs import bucket_of
from roadmatch.bundle import default_bundle_folder
from roadmatch.errors import RoadmatchError
from roadmatch.jobs.hosts import hosts_of

PREFIX = "ROADMATCH_"
DATABASE = "roadmatch.db"
"""Of SQLite, in the data folder."""


class SettingsError(RoadmatchError):
    """A setting that is unknown or out of range."""


class Settings(BaseSettings):
    """What `roadmatch serve` runs with; each field is the variable ROADMATCH_<NAME>."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid", allow_inf_nan=False)

    data: Path = Field(Path("roadmatch-data"), description="folder of the database and the pictures")
    database: str = Field("", description="database URL; empty: SQLite in the data folder")
    blobs: str = Field(
        "", description="where pictures and uploads are kept: s3://bucket/prefix; empty: in the data folder"
    )
    bundles: Annotated[tuple[Path, ...], NoDecode] = Field(
        (default_bundle_folder(),),
        min_length=1,
        description="bundle folders, separated by `:`; the first is the default",
    )
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65_535, description="port to listen on; 0: any free one")
    hosts: str = Field("", description="more names by which it may be asked, as behind a proxy, separated by `,`")
    allow_open: bool = Field(False, description="listen on other machines' side without any protection")
    cpus: int = Field(0, ge=0, le=1024, description="threads for embedding and decoding; 0: all cores")
    workers: int = Field(
        1, ge=0, le=64, description="processes that work on jobs, started when there is one; 0: workers run elsewhere"
    )
    broker: str = Field(
        "", description="Redis URL by which Celery workers hear of jobs; they run elsewhere; empty: none"
    )
    nice: int = Field(10, ge=0, le=19, description="how much those processes give way to searches")
    device: Literal["cpu", "cuda"] = Field("cpu", description="where pictures are embedded")
    queue: int = Field(64, ge=0, le=10_000, description="requests that may wait for a core; more are answered 503")
    body_mb: int = Field(64, ge=1, le=2_000, description="largest request body, MB")
    import_mb: int = Field(10_000, ge=1, le=1_000_000, description="largest uploaded archive or manifest, MB")
    import_folders: Annotated[tuple[Path, ...], NoDecode] = Field(
        (), description="folders of the server that may be imported, with all that is in them, separated by `:`"
    )
    import_hosts: str = Field(
        "", description="hosts whose https URLs a manifest may name, separated by `,`; empty: no URL is fetched"
    )
    receive_s: float = Field(
        30.0, gt=0, le=3_600, description="time for a request's head, and for its body, to arrive, seconds"
    )
    shutdown_s: int = Field(20, ge=0, le=3_600, description="time for requests in flight after SIGTERM, seconds")
    sweep_s: int = Field(
        3_600, ge=1, le=86_400, description="age at which a picture that no row names is removed, seconds"
    )
    failpoint: str = Field("", description="for fault tests: `moment@n` kills the process at the nth such moment")

    @field_validator("bundles", "import_folders", mode="before")
    @classmethod
    def _split_paths(cls, value: Any) -> Any:
        return tuple(Path(part) for part in value.split(os.pathsep) if part) if isinstance(value, str) else value

    @field_validator("import_folders")
    @classmethod
    def _are_absolute(cls, value: tuple[Path, ...]) -> tuple[Path, ...]:
        for folder in value:
            if not folder.is_absolute():
                raise ValueError(f"{folder} is no absolute path: write it from the root on, as in /srv/pictures")
        return value

    @field_validator("import_hosts")
    @classmethod
    def _are_hosts(cls, value: str) -> str:
        hosts_of(value)
        return value

    @field_validator("broker")
    @classmethod
    def _is_redis(cls, value: str) -> str:
        if value and not re.match(r"rediss?://.", value):  # the value may hold a password, so it is not shown
            raise ValueError("this is no URL of a Redis: write it as redis://redis:6379/0")
        return value

    @field_validator("blobs")
    @classmethod
    def _is_bucket(cls, value: str) -> str:
        if value:
            bucket_of(value)
        return value

    @classmethod
    def read(cls, environment: Mapping[str, str] | None = None, **given: Any) -> Self:
        """The settings of the environment, with what the command line gave on top. Raises SettingsError."""
        return _read(cls, environment, given)

    @property
    def database_url(self) -> str:
        """The database that is used."""
        return self.database or f"sqlite:///{(self.data / DATABASE).absolute()}"

    @property
    def threads(self) -> int:
        """Threads for decoding and embedding."""
        return self.cpus or len(os.sched_getaffinity(0))


class ClientSettings(BaseSettings):
    """What the client commands run with; as in Settings."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid")

    url: str = Field("http://127.0.0.1:8000", description="address of the running service, for the client commands")

    @field_validator("url")
    @classmethod
    def _is_address(cls, value: str) -> str:
        if not re.fullmatch(r"https?://[^\s/?#]+(/[^\s?#]*)?", value):
            raise ValueError(f"{value!r} is no address of a service: write it as http://127.0.0.1:8000")
        return value.rstrip("/")

    @classmethod
    def read(cls, environment: Mapping[str, str] | None = None, **given: Any) -> Self:
        """The settings of the environment, with what the command line gave on top. Raises SettingsError."""
        return _read(cls, environment, given)


Kind = TypeVar("Kind", bound=BaseSettings)


def _read(kind: type[Kind], environment: Mapping[str, str] | None, given: Mapping[str, Any]) -> Kind:
    known = [PREFIX + name.upper() for settings in (Settings, ClientSettings) for name in settings.model_fields]
    names = {name for name in (os.environ if environment is None else environment) if name.startswith(PREFIX)}
    for name in sorted(names):
        if name.upper() not in known:
            raise SettingsError(f"{name} is no setting of Roadmatch: use one of {', '.join(known)}")
    try:
        return kind(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        message = first["msg"].removeprefix("Value error, ")
        raise SettingsError(f"{PREFIX}{str(first['loc'][0]).upper()}: {message}") from error


def environment_of_a_child() -> dict[str, str]:
    """This process's environment without any setting of Roadmatch, for a service that takes them all as options."""
    return {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
