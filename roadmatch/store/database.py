"""One SQL database: opening it, its transactions, and its failures as errors of ours.

Both databases behave alike from outside: one writer of a gallery at a time, readers that never wait for writers, and
StoreUnavailable after the busy timeout instead of a wait without end.
"""

import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import sqlalchemy
from sqlalchemy import URL, Connection, Engine, Select, create_engine, event, make_url, text
from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, OperationalError

from roadmatch.errors import StorageFull, StoreUnavailable
from roadmatch.store import migrations

_CONNECTIONS = 40
"""Connections of one process at most: as many as threads that serve requests."""
_MIGRATION_WAIT_S = 60.0
"""So long a start waits for another process that migrates the same database."""
_SQLITE_BUSY_S, _POSTGRES_BUSY_S = 5.0, 2.3
"""Busy timeouts: writers of SQLite all wait for each other, those of PostgreSQL where they write to one gallery."""
_CHECKPOINT_WAIT_S = 0.2
"""So long a checkpoint waits for readers: writers wait for it meanwhile."""
_IDLE_TRANSACTION_S = 60
"""PostgreSQL ends a transaction whose client is gone after so long, and with it the lock on a gallery."""
_MORE_S = 0.3
"""So much later than a lock's wait a statement is ended, so that a lock is called one."""
_ANSWER_S = 0.5
"""So long after PostgreSQL should have ended a statement by itself it is taken for dead."""
_MIGRATION_LOCK = 0x726F61646D617463  # "roadmatc"

_SQLITE_CONNECTION = ("synchronous = FULL", "foreign_keys = ON", "secure_delete = ON", "temp_store = MEMORY")
_SQLITE_REASONS = {
    sqlite3.SQLITE_BUSY: "is locked by another writer",
    sqlite3.SQLITE_LOCKED: "is locked by another writer",
    sqlite3.SQLITE_READONLY: "cannot be written",
    sqlite3.SQLITE_IOERR: "cannot be read or written",
    sqlite3.SQLITE_CORRUPT: "is damaged",
    sqlite3.SQLITE_FULL: "has no room left",
    sqlite3.SQLITE_CANTOPEN: "cannot be opened",
    sqlite3.SQLITE_NOTADB: "is not an SQLite file",
}
_POSTGRES_REASONS = {
    "55P03": "is locked by another writer",
    "57014": "took too long",
    "40P01": "is locked by another writer",
    "53100": "has no room left",
    "53300": "takes no more connections",
}


class Database:
    """A migrated database with its connections; safe to use from many threads, never over a fork."""

    def __init__(self, reads: Engine, writes: Engine, busy_timeout_s: float) -> None:
        """reads, writes: engines of the same database, the writing one of SQLite with a single connection."""
        self._sqlite = writes.dialect.name == "sqlite"
        self._reads, self._snapshots, self._writes = reads, reads, writes
        if not self._sqlite:  # neither sends BEGIN and ROLLBACK around a lone SELECT
            self._reads = reads.execution_options(isolation_level="AUTOCOMMIT")
            self._snapshots = reads.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
        self._busy_timeout_s = busy_timeout_s
        self._looks: dict[Select[Any], tuple[str, Sequence[str]]] = {}

    @contextmanager
    def read(self, *, snapshot: bool = False) -> Iterator[Connection]:
        """A connection to read with; every statement sees the newest commit.

        snapshot: all statements see the same moment instead. Raises StoreUnavailable.
        """
        try:
            with (self._snapshots if snapshot else self._reads).connect() as connection:
                if snapshot and self._sqlite:
                    connection.exec_driver_sql("BEGIN")
                yield connection
        except (DBAPIError, sqlalchemy.exc.TimeoutError) as error:
            _raise_unavailable(error)

    def look(self, statement: Select[Any], parameters: Mapping[str, str | int]) -> Sequence[Any] | None:
        """The one row that a statement finds, or None: for what every search asks. Raises StoreUnavailable.

        SQLite is asked without SQLAlchemy, whose code takes 0.4 ms once a picture's decoding has pushed it out of the
        processor's cache, so select what needs no conversion: whole numbers and texts.
        """
        if not self._sqlite:
            with self.read() as connection:
                return connection.execute(statement, parameters).one_or_none()
        try:
            pooled = self._reads.raw_connection()
            try:
                text_, names = self._looks.get(statement) or self._compiled(statement)
                cursor = pooled.cursor()
                rows = cursor.execute(text_, [parameters[name] for name in names]).fetchmany(2)
                cursor.close()
            finally:
                pooled.close()
        except sqlite3.Error as error:
            _raise_unavailable(DBAPIError(None, None, error))
        except sqlalchemy.exc.TimeoutError as error:
            _raise_unavailable(error)
        assert len(rows) < 2
        row: Sequence[Any] | None = rows[0] if rows else None
        return row

    @contextmanager
    def write(self, *, long: bool = False) -> Iterator[Connection]:
        """A writing transaction: committed at the end of the block, rolled back if it raises.

        long: its statements may take longer than the busy timeout; waiting for another writer may not.
        Raises StoreUnavailable. When the connection breaks in the commit itself, the commit may have happened.
        """
        with self._transaction(self._busy_timeout_s, long) as connection:
            yield connection

    def checkpoint(self) -> bool:
        """Empty SQLite's write-ahead log, where deleted bytes stay until then -> whether no reader was in the way."""
        if not self._sqlite:
            return True
        try:
            connection = self._writes.raw_connection()
            try:
                cursor = connection.cursor()
                cursor.execute(f"PRAGMA busy_timeout = {int(_CHECKPOINT_WAIT_S * 1000)}")
                busy, _, _ = cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
                cursor.close()
            finally:
                connection.close()
        except (sqlite3.OperationalError, DBAPIError, sqlalchemy.exc.TimeoutError):
            return False
        return not busy

    def ping(self) -> None:
        """Raises StoreUnavailable unless the database answers from its tables."""
        with self.read() as connection:
            connection.execute(text("SELECT version_num FROM alembic_version")).all()

    def close(self) -> None:
        """Close every connection."""
        self._reads.dispose()
        self._writes.dispose()

    def migrate(self) -> None:
        """Bring the tables up to date, one process at a time; raises StoreVersionMismatch, StoreUnavailable."""
        with self.read() as connection:
            if migrations.is_current(connection):
                return
        with self._transaction(_MIGRATION_WAIT_S, long=True) as connection:
            if not self._sqlite:
                connection.execute(text(f"SET LOCAL lock_timeout = {int(_MIGRATION_WAIT_S * 1000)}"))
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK})
            migrations.migrate(connection)

    def _compiled(self, statement: Select[Any]) -> tuple[str, Sequence[str]]:
        compiled = statement.compile(dialect=self._reads.dialect)
        self._looks[statement] = str(compiled), compiled.positiontup or ()
        return self._looks[statement]

    @contextmanager
    def _patience(self, connection: Connection, long: bool) -> Iterator[None]:
        if self._sqlite or not long:
            yield
            return
        from roadmatch.store.impatience import patience  # needs the driver of PostgreSQL

        connection.exec_driver_sql("SET LOCAL statement_timeout = 0")
        with patience(connection):
            yield

    @contextmanager
    def _transaction(self, wait_s: float, long: bool) -> Iterator[Connection]:
        started = time.monotonic()
        try:
            with self._writes.connect() as connection, connection.begin():
                if self._sqlite:
                    # Threads of this process have waited for its one writing connection; what is left of the wait is
                    # for other processes.
                    left_s = max(0.0, wait_s - (time.monotonic() - started))
                    connection.exec_driver_sql(f"PRAGMA busy_timeout = {int(left_s * 1000)}")
                    connection.exec_driver_sql("BEGIN IMMEDIATE")  # a deferred one fails at once despite its timeout
                with self._patience(connection, long):
                    yield connection
        except (DBAPIError, sqlalchemy.exc.TimeoutError) as error:
            _raise_unavailable(error)


def open_database(url: str, *, busy_timeout_s: float | None = None) -> Database:
    """Open `sqlite:///path` or `postgresql://...` and bring its tables up to date.

    busy_timeout_s: how long a transaction waits for a lock, a connection or an answer; by default 5 with SQLite and
    2.3 with PostgreSQL, so that a request that it keeps waiting is refused within 3.
    Raises StoreUnavailable, StoreVersionMismatch (a newer Roadmatch wrote it), ValueError (another kind of URL, or no
    driver for it).
    """
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise ValueError("not the URL of a database") from error  # without the URL: it may hold a password
    kind = parsed.get_backend_name()
    if kind == "sqlite":
        database = _open_sqlite(parsed, _SQLITE_BUSY_S if busy_timeout_s is None else busy_timeout_s)
    elif kind in ("postgresql", "postgres"):
        database = _open_postgres(parsed, _POSTGRES_BUSY_S if busy_timeout_s is None else busy_timeout_s)
    else:
        raise ValueError(f"{kind} is not a database that Roadmatch uses: sqlite:///path or postgresql://...")
    try:
        database.migrate()
    except BaseException:
        database.close()
        raise
    return database


def _open_sqlite(url: URL, busy_timeout_s: float) -> Database:
    if not url.database or url.database == ":memory:":
        raise ValueError("an SQLite database needs a file: sqlite:///path")
    # isolation_level None leaves BEGIN to us, alike in Python 3.11 and beside the autocommit attribute of 3.12.
    connect_args: dict[str, Any] = {"isolation_level": None, "timeout": busy_timeout_s}
    shared: dict[str, Any] = {"connect_args": connect_args, "pool_timeout": busy_timeout_s}
    reads = create_engine(url, pool_size=_CONNECTIONS, max_overflow=0, pool_use_lifo=True, **shared)
    # One writing connection: threads queue for it in order, which SQLite's own polling for the lock does not give.
    writes = create_engine(url, pool_size=1, max_overflow=0, **shared)
    event.listen(reads, "connect", _set_up_reader)
    event.listen(writes, "connect", _set_up_writer)
    database = Database(reads, writes, busy_timeout_s)
    try:
        _use_write_ahead_log(writes, busy_timeout_s)
    except DBAPIError as error:
        database.close()
        _raise_unavailable(error)
    return database


def _set_up_writer(connection: sqlite3.Connection, _: object) -> None:
    for setting in _SQLITE_CONNECTION:
        connection.execute(f"PRAGMA {setting}").close()


def _set_up_reader(connection: sqlite3.Connection, _: object) -> None:
    _set_up_writer(connection, _)
    connection.execute("PRAGMA query_only = ON").close()


def _use_write_ahead_log(writes: Engine, busy_timeout_s: float) -> None:
    """Several processes may do this at once, and SQLite then refuses without waiting."""
    deadline = time.monotonic() + busy_timeout_s
    while True:
        try:
            with writes.connect() as connection:
                connection.exec_driver_sql("PRAGMA journal_mode = WAL")
            return
        except OperationalError as error:
            if _sqlite_code(error) != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
        time.sleep(0.01)


def _open_postgres(url: URL, busy_timeout_s: float) -> Database:
    # The server allows each lock its time, and a row that several wait for takes two; a statement has a little more.
    statement_s = busy_timeout_s + _MORE_S
    settings = {
        "timezone": "UTC",
        "lock_timeout": int(busy_timeout_s * 1000),
        "statement_timeout": int(statement_s * 1000),
        "idle_in_transaction_session_timeout": _IDLE_TRANSACTION_S * 1000,
    }
    options = " ".join(f"-c {name}={value}" for name, value in settings.items())
    given = url.query.get("options", "")
    connect_args: dict[str, Any] = {
        "connect_timeout": max(2, int(busy_timeout_s)),
        "tcp_user_timeout": int(statement_s * 1000),
        "application_name": "roadmatch",
        "options": f"{options} {given if isinstance(given, str) else ' '.join(given)}".strip(),
    }
    try:
        from roadmatch.store.impatience import give_up_after

        engine = create_engine(
            url.set(drivername="postgresql+psycopg"),
            connect_args=connect_args,
            pool_size=_CONNECTIONS // 4,
            max_overflow=_CONNECTIONS * 3 // 4,
            pool_timeout=busy_timeout_s,
            pool_pre_ping=True,
            pool_use_lifo=True,
        )
    except ModuleNotFoundError as error:
        raise ValueError("PostgreSQL needs the driver psycopg: pip install 'roadmatch[postgres]'") from error
    give_up_after(engine, statement_s + _ANSWER_S)
    return Database(engine, engine, busy_timeout_s)


def _raise_unavailable(error: DBAPIError | sqlalchemy.exc.TimeoutError) -> NoReturn:
    """Raise what stands for a locked, full or gone database; any other failure is a mistake of ours and stays."""
    if isinstance(error, sqlalchemy.exc.TimeoutError):
        raise StoreUnavailable("the database has no free connection: try again") from error
    original = error.orig
    if isinstance(original, sqlite3.Error):
        code = _sqlite_code(error)
        if code not in _SQLITE_REASONS:
            raise error
        kind = StorageFull if code == sqlite3.SQLITE_FULL else StoreUnavailable
        raise kind(f"the database {_SQLITE_REASONS[code]}: try again") from error
    if not (error.connection_invalidated or isinstance(error, OperationalError | InterfaceError)):
        raise error
    state = getattr(original, "sqlstate", None) or ""
    kind = StorageFull if state == "53100" else StoreUnavailable
    raise kind(f"the database {_POSTGRES_REASONS.get(state, 'does not answer')}: try again") from error


def _sqlite_code(error: DBAPIError) -> int:
    """The primary result code; 0 where the driver raised without asking SQLite."""
    return getattr(error.orig, "sqlite_errorcode", 0) & 0xFF
