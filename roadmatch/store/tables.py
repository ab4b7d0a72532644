"""The tables; everything else is derived from them."""

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    TypeDecorator,
    false,
    func,
)

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(referred_table_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
    }
)


class Moment(TypeDecorator[datetime]):
    """An aware datetime in UTC; SQLite keeps no offset, so a naive one would pass unseen."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Any) -> datetime | None:  # noqa: ARG002
        """value aware -> in UTC."""
        if value is not None and value.tzinfo is None:
            raise ValueError(f"a moment needs its offset: {value}")
        return value and value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Any) -> datetime | None:  # noqa: ARG002
        """Naive values come from SQLite and are in UTC."""
        if value is None or value.tzinfo is None:
            return value and value.replace(tzinfo=UTC)
        return value.astimezone(UTC)


_Key = BigInteger().with_variant(Integer, "sqlite")  # SQLite counts rowids only for a column called INTEGER

galleries = Table(
    "galleries",
    metadata,
    Column("id", _Key, Identity(), primary_key=True),
    Column("name", String(128, collation="C").with_variant(String(128), "sqlite"), nullable=False, unique=True),
    Column("bundle", String(160), nullable=False),
    Column("rule", String(64), nullable=False),
    Column("keep", String(16), nullable=False),
    Column("seq", BigInteger, nullable=False, server_default="0"),  # of the newest entry of its change log
    Column("writes", BigInteger, nullable=False, server_default="0"),  # to its items: a new label is one, and no change
    Column("items", BigInteger, nullable=False, server_default="0"),
    Column("images", BigInteger, nullable=False, server_default="0"),
    Column("created_at", Moment, nullable=False, server_default=func.now()),
    CheckConstraint("keep IN ('original', 'none')", name="keep"),
    sqlite_autoincrement=True,  # a deleted gallery's id never comes back: replicas know galleries by it
)

items = Table(
    "items",
    metadata,
    Column("gallery_id", ForeignKey(galleries.c.id), primary_key=True),
    Column("id", String(128, collation="C").with_variant(String(128), "sqlite"), primary_key=True),
    Column("label", String(256)),
    Column("metadata", JSON, nullable=False),
    Column("version", BigInteger, nullable=False),  # the gallery's writes when the item was last written
    Column("created_at", Moment, nullable=False, server_default=func.now()),
    Column("updated_at", Moment, nullable=False, server_default=func.now()),
)

images = Table(
    "images",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("gallery_id", _Key, nullable=False),
    Column("item_id", String(128, collation="C").with_variant(String(128), "sqlite"), nullable=False),
    Column("sha256", String(64), nullable=False),  # of the bytes as uploaded
    Column("format", String(8), nullable=False),
    Column("width", Integer, nullable=False),
    Column("height", Integer, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("blob", String(64), unique=True),  # key of the kept bytes; null where the gallery keeps none
    Column("created_at", Moment, nullable=False, server_default=func.now()),
    ForeignKeyConstraint(["gallery_id", "item_id"], [items.c.gallery_id, items.c.id]),
    Index(None, "gallery_id", "item_id"),
)

embeddings = Table(
    "embeddings",
    metadata,
    Column("image_id", ForeignKey(images.c.id), primary_key=True),
    Column("bundle", String(160), primary_key=True),
    Column("vector", LargeBinary, nullable=False),  # float32, little-endian
    Column("b", Double, nullable=False),  # level of the background, roadmatch.scoring
)

changes = Table(
    "changes",
    metadata,
    Column("gallery_id", ForeignKey(galleries.c.id), primary_key=True),
    Column("seq", BigInteger, primary_key=True, autoincrement=False),  # dense per gallery, in order of commit
    Column("kind", String(8), nullable=False),
    Column("image_id", String(32), nullable=False),  # our own id only: nothing of the caller's outlives an erasure
    Column("at", Moment, nullable=False, server_default=func.now()),
    CheckConstraint("kind IN ('add', 'remove')", name="kind"),
)

jobs = Table(
    "jobs",
    metadata,
    Column("id", String(32, collation="C").with_variant(String(32), "sqlite"), primary_key=True),  # sorts by age
    Column("kind", String(16), nullable=False),
    Column("gallery_id", _Key, nullable=False),  # a job outlives its gallery
    Column("gallery", String(128), nullable=False),
    Column("source", JSON, nullable=False),
    Column("state", String(16), nullable=False, server_default="queued"),
    Column("priority", Integer, nullable=False, server_default="0"),
    Column("position", BigInteger, nullable=False, server_default="0"),  # entries that are finished, one way or another
    Column("total", BigInteger),  # null until somebody has counted
    Column("done", BigInteger, nullable=False, server_default="0"),
    Column("unchanged", BigInteger, nullable=False, server_default="0"),
    Column("failed", BigInteger, nullable=False, server_default="0"),
    Column("error", String(512)),
    Column("cancel", Boolean, nullable=False, server_default=false()),  # somebody asked for it
    Column("attempts", Integer, nullable=False, server_default="0"),  # claims since the position last moved
    Column("fence", BigInteger, nullable=False, server_default="0"),  # of the newest claim
    Column("lease_until", Double),  # seconds since 1970 by the database's clock; null: nobody has it
    Column("key", String(128), unique=True),  # Idempotency-Key
    Column("request", String(64)),  # sha256 of what the key was used for
    Column("created_at", Moment, nullable=False, server_default=func.now()),
    Column("started_at", Moment),
    Column("finished_at", Moment),
    CheckConstraint("kind IN ('import', 'delete')", name="kind"),
    CheckConstraint("state IN ('queued', 'running', 'succeeded', 'failed', 'cancelled')", name="state"),
    Index(None, "state", "priority"),
)

job_failures = Table(
    "job_failures",
    metadata,
    Column("job_id", ForeignKey(jobs.c.id), primary_key=True),
    Column("position", BigInteger, primary_key=True, autoincrement=False),  # of the entry in its source, from 0
    Column("name", String(512), nullable=False),
    Column("code", String(64), nullable=False),
    Column("detail", String(512), nullable=False),
)
