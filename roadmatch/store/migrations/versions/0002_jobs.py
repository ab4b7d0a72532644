"""Jobs and their failed entries."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_key = sa.BigInteger().with_variant(sa.Integer, "sqlite")
_moment = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(32, collation="C").with_variant(sa.String(32), "sqlite"), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("gallery_id", _key, nullable=False),
        sa.Column("gallery", sa.String(128), nullable=False),
        sa.Column("source", sa.JSON, nullable=False),
        sa.Column("state", sa.String(16), nullable=False, server_default="queued"),
        sa.Column("priority", sa.Integer, nullable=False, server_default="0"),
        sa.Column("position", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("total", sa.BigInteger),
        sa.Column("done", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("unchanged", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("failed", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("error", sa.String(512)),
        sa.Column("cancel", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("attempts", sa.Integer, nullable=False, server_default="0"),
        sa.Column("fence", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("lease_until", sa.Double),
        sa.Column("key", sa.String(128)),
        sa.Column("request", sa.String(64)),
        sa.Column("created_at", _moment, nullable=False, server_default=sa.func.now()),
        sa.Column("started_at", _moment),
        sa.Column("finished_at", _moment),
        sa.PrimaryKeyConstraint("id", name="pk_jobs"),
        sa.UniqueConstraint("key", name="uq_jobs_key"),
        sa.CheckConstraint("kind IN ('import', 'delete')", name="ck_jobs_kind"),
        sa.CheckConstraint(
            "state IN ('queued', 'running', 'succeeded', 'failed', 'cancelled')", name="ck_jobs_state"
        ),
    )
    op.create_index("ix_jobs_state_priority", "jobs", ["state", "priority"])
    op.create_table(
        "job_failures",
        sa.Column("job_id", sa.String(32, collation="C").with_variant(sa.String(32), "sqlite"), nullable=False),
        sa.Column("position", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("name", sa.String(512), nullable=False),
        sa.Column("code", sa.String(64), nullable=False),
        sa.Column("detail", sa.String(512), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "position", name="pk_job_failures"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_job_failures_jobs"),
    )
