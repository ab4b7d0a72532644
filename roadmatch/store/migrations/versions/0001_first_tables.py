"""Galleries, items, images, embeddings and the change log."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_key = sa.BigInteger().with_variant(sa.Integer, "sqlite")
_moment = sa.DateTime(timezone=True)


def _ordered(length: int) -> sa.String:
    return sa.String(length, collation="C").with_variant(sa.String(length), "sqlite")


def upgrade() -> None:
    op.create_table(
        "galleries",
        sa.Column("id", _key, sa.Identity(), nullable=False),
        sa.Column("name", _ordered(128), nullable=False),
        sa.Column("bundle", sa.String(160), nullable=False),
        sa.Column("rule", sa.String(64), nullable=False),
        sa.Column("keep", sa.String(16), nullable=False),
        sa.Column("seq", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("writes", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("items", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("images", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("created_at", _moment, nullable=False, server_default=sa.func.now()),
        sa.PrimaryKeyConstraint("id", name="pk_galleries"),
        sa.UniqueConstraint("name", name="uq_galleries_name"),
        sa.CheckConstraint("keep IN ('original', 'none')", name="ck_galleries_keep"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "items",
        sa.Column("gallery_id", _key, nullable=False),
        sa.Column("id", _ordered(128), nullable=False),
        sa.Column("label", sa.String(256)),
        sa.Column("metadata", sa.JSON, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("created_at", _moment, nullable=False, server_default=sa.func.now()),
        sa.Column("updated_at", _moment, nullable=False, server_default=sa.func.now()),
        sa.PrimaryKeyConstraint("gallery_id", "id", name="pk_items"),
        sa.ForeignKeyConstraint(["gallery_id"], ["galleries.id"], name="fk_items_galleries"),
    )
    op.create_table(
        "images",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("gallery_id", _key, nullable=False),
        sa.Column("item_id", _ordered(128), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("format", sa.String(8), nullable=False),
        sa.Column("width", sa.Integer, nullable=False),
        sa.Column("height", sa.Integer, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("blob", sa.String(64)),
        sa.Column("created_at", _moment, nullable=False, server_default=sa.func.now()),
        sa.PrimaryKeyConstraint("id", name="pk_images"),
        sa.UniqueConstraint("blob", name="uq_images_blob"),
        sa.ForeignKeyConstraint(["gallery_id", "item_id"], ["items.gallery_id", "items.id"], name="fk_images_items"),
    )
    op.create_index("ix_images_gallery_id_item_id", "images", ["gallery_id", "item_id"])
    op.create_table(
        "embeddings",
        sa.Column("image_id", sa.String(32), nullable=False),
        sa.Column("bundle", sa.String(160), nullable=False),
        sa.Column("vector", sa.LargeBinary, nullable=False),
        sa.Column("b", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("image_id", "bundle", name="pk_embeddings"),
        sa.ForeignKeyConstraint(["image_id"], ["images.id"], name="fk_embeddings_images"),
    )
    op.create_table(
        "changes",
        sa.Column("gallery_id", _key, nullable=False),
        sa.Column("seq", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("kind", sa.String(8), nullable=False),
        sa.Column("image_id", sa.String(32), nullable=False),
        sa.Column("at", _moment, nullable=False, server_default=sa.func.now()),
        sa.PrimaryKeyConstraint("gallery_id", "seq", name="pk_changes"),
        sa.ForeignKeyConstraint(["gallery_id"], ["galleries.id"], name="fk_changes_galleries"),
        sa.CheckConstraint("kind IN ('add', 'remove')", name="ck_changes_kind"),
    )
