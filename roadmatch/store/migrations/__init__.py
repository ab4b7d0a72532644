"""Bringing the tables of a database up to those of this version."""

import threading
from pathlib import Path

from alembic.config import Config
from alembic.runtime.environment import EnvironmentContext
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

from roadmatch.errors import StoreVersionMismatch

_one_at_a_time = threading.Lock()  # alembic's operations stand in a global of its module


def is_current(connection: Connection) -> bool:
    """Whether the database has the newest tables; raises StoreVersionMismatch for one of a newer Roadmatch."""
    known = ScriptDirectory(str(Path(__file__).parent))
    newest = known.get_current_head()
    here = MigrationContext.configure(connection).get_current_revision()
    if here is not None and here not in {script.revision for script in known.walk_revisions()}:
        raise StoreVersionMismatch(f"the database has tables of version {here}, this Roadmatch knows {newest} at most")
    return here == newest


def migrate(connection: Connection) -> None:
    """Run what is missing inside the connection's transaction, so that a killed migration leaves no trace."""
    if is_current(connection):  # another process was faster
        return
    known = ScriptDirectory(str(Path(__file__).parent))
    with (
        _one_at_a_time,
        EnvironmentContext(Config(), known, fn=lambda here, _: known._upgrade_revs("head", here)) as environment,
    ):
        environment.configure(connection=connection)
        with environment.begin_transaction():
            environment.run_migrations()
