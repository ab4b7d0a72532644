"""The worker's settings: ROADMATCH_* variables, read once; most are the app's, too."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from roadmatch.blobs import bucket_of
from roadmatch.bundle import default_bundle_folder
from roadmatch.errors import RoadmatchError
from roadmatch.jobs.hosts import hosts_of

PREFIX = "ROADMATCH_"
OF_THE_APP = (
    "host",
    "port",
    "hosts",
    "allow_open",
    "queue",
    "body_mb",
    "import_mb",
    "receive_s",
    "shutdown_s",
    "sweep_s",
    "workers",
    "url",
)
"""Settings that may be in the environment of both programs and mean nothing here."""


class SettingsError(RoadmatchError):
    """A setting that is unknown or out of range."""


class Settings(BaseSettings):
    """What `python -m worker` runs with; each field is the variable ROADMATCH_<NAME>."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid", allow_inf_nan=False)

    data: Path = Field(Path("roadmatch-data"), description="folder of the database and the pictures")
    database: str = Field("", description="database URL; empty: SQLite in the data folder")
    blobs: str = Field(
        "", description="where pictures and uploads are kept: s3://bucket/prefix; empty: in the data folder"
    )
    bundles: Annotated[tuple[Path, ...], NoDecode] = Field((default_bundle_folder(),), min_length=1)
    cpus: int = Field(0, ge=0, le=1024, description="threads for embedding and decoding; 0: all cores")
    device: Literal["cpu", "cuda"] = Field("cpu", description="where pictures are embedded")
    import_folders: Annotated[tuple[Path, ...], NoDecode] = Field((), description="folders that may be imported")
    import_hosts: str = Field("", description="hosts whose pictures may be fetched, separated by `,`")
    broker: str = Field("", description="Redis URL by which Celery workers hear of jobs")
    nice: int = Field(10, ge=0, le=19, description="how much a worker gives way to searches")
    failpoint: str = Field("", description="for fault tests: `moment@n` kills the process at the nth such moment")

    @field_validator("bundles", "import_folders", mode="before")
    @classmethod
    def _split_paths(cls, value: Any) -> Any:
        return tuple(Path(part) for part in value.split(os.pathsep) if part) if isinstance(value, str) else value

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
        """The settings of the environment, with others in their place. Raises SettingsError."""
        known = [PREFIX + name.upper() for name in (*cls.model_fields, *OF_THE_APP)]
        for name in sorted(os.environ if environment is None else environment):
            if name.startswith(PREFIX) and name.upper() not in known:
                raise SettingsError(f"{name} is no setting of Roadmatch: use one of {', '.join(known)}")
        try:
            return cls(**given)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            message = first["msg"].removeprefix("Value error, ")
            raise SettingsError(f"{PREFIX}{str(first['loc'][0]).upper()}: {message}") from error

    @property
    def database_url(self) -> str:
        """The database that is used."""
        return self.database or f"sqlite:///{(self.data / 'roadmatch.db').absolute()}"

    @property
    def threads(self) -> int:
        """Threads for decoding and embedding."""
        return self.cpus or len(os.sched_getaffinity(0))

    @property
    def hosts(self) -> frozenset[str]:
        """Hosts whose pictures may be fetched."""
        return hosts_of(self.import_hosts)
