"""roadmatch.store.database: opening, migrating, transactions and failures, on both databases."""

import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Column, Identity, func, insert, select, text
from sqlalchemy.exc import OperationalError, ProgrammingError

from roadmatch.errors import StorageFull, StoreUnavailable, StoreVersionMismatch
from roadmatch.store.database import Database, open_database
from roadmatch.store.tables import galleries, metadata
from tests.postgres import PostgresServer

ROW = {"name": "birds", "bundle": "b", "rule": "max_f1", "keep": "none"}


def differences(database: Database) -> list[object]:
    """What alembic would change to turn the database into the tables of the code."""

    def compare_default(context: object, _: object, column: Column[object], *more: object) -> bool | None:
        return False if isinstance(column.server_default, Identity) else None

    with database.read() as connection:
        sqlite = connection.dialect.name == "sqlite"  # which has no identities to compare
        options = {"compare_type": True, "compare_server_default": compare_default if sqlite else True}
        return list(compare_metadata(MigrationContext.configure(connection, opts=options), metadata))


def count_galleries(database: Database) -> int:
    with database.read() as connection:
        return connection.execute(select(func.count()).select_from(galleries)).scalar_one()


def write_two(database: Database, between: Callable[[], None]) -> None:
    """One transaction with two rows, and something that happens between them."""
    with database.write() as connection:
        connection.execute(insert(galleries), ROW | {"name": "first"})
        between()
        connection.execute(insert(galleries), ROW | {"name": "second"})


def run(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True)


@contextmanager
def sqlite_locked(path: str) -> Iterator[None]:
    """Another process has the write lock, as far as SQLite can tell: another connection that we know nothing of."""
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    yield
    other.close()


def test_migrations_make_exactly_the_tables_of_the_code(database: Database) -> None:
    assert differences(database) == []
    with database.write() as connection:
        connection.execute(text("DROP INDEX ix_images_gallery_id_item_id"))
    assert len(differences(database)) == 1  # the comparison sees what is missing


def test_processes_that_open_one_new_database_at_once_all_succeed(database_url: str) -> None:
    code = "import sys; from roadmatch.store.database import open_database; open_database(sys.argv[1]).ping()"
    processes = [run(code, database_url) for _ in range(4)]
    assert [process.wait(30) for process in processes] == [0] * 4
    for process in processes:
        process.communicate()
    database = open_database(database_url)
    assert differences(database) == []
    database.close()


def test_threads_that_open_one_new_database_at_once_all_succeed(database_url: str) -> None:
    opened: list[Database] = []
    threads = [threading.Thread(target=lambda: opened.append(open_database(database_url))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened) == 4
    for database in opened:
        database.ping()
        database.close()


def test_a_migration_killed_halfway_is_run_again(database_url: str) -> None:
    code = """
import os, signal, sys
from sqlalchemy import Engine, event
from roadmatch.store.database import open_database

@event.listens_for(Engine, "after_cursor_execute")
def kill(connection, cursor, statement, *_):
    if "CREATE TABLE images" in statement:
        os.kill(os.getpid(), signal.SIGKILL)

open_database(sys.argv[1])
"""
    process = run(code, database_url)
    assert process.wait(30) == -signal.SIGKILL
    process.communicate()
    database = open_database(database_url)
    assert differences(database) == []
    database.close()


def test_a_database_of_a_newer_version_is_refused_by_name(database: Database, database_url: str) -> None:
    with database.write() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(StoreVersionMismatch, match="9999"):
        open_database(database_url)


def test_opening_an_up_to_date_database_needs_no_write_lock(sqlite_url: str, tmp_path: Path) -> None:
    open_database(sqlite_url).close()
    with sqlite_locked(str(tmp_path / "roadmatch.db")):
        started = time.monotonic()
        open_database(sqlite_url).close()
        assert time.monotonic() - started < 1


def test_a_block_that_raises_leaves_nothing(database: Database) -> None:
    def fail() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        write_two(database, between=fail)
    assert count_galleries(database) == 0
    with database.write() as connection:
        connection.execute(insert(galleries), ROW)
    assert count_galleries(database) == 1


def test_a_snapshot_stands_still_and_a_plain_read_does_not(database: Database) -> None:
    counted = select(func.count()).select_from(galleries)
    with database.read(snapshot=True) as still, database.read() as moving:
        assert still.execute(counted).scalar_one() == moving.execute(counted).scalar_one() == 0
        with database.write() as connection:
            connection.execute(insert(galleries), ROW)
        assert still.execute(counted).scalar_one() == 0
        assert moving.execute(counted).scalar_one() == 1


def test_readers_cannot_write_to_sqlite(sqlite_url: str) -> None:
    database = open_database(sqlite_url)
    with pytest.raises(StoreUnavailable, match="cannot be written"), database.read() as connection:
        connection.execute(insert(galleries), ROW)
    database.close()


def test_sqlite_is_set_up_for_durable_and_erasable_writes(sqlite_url: str) -> None:
    database = open_database(sqlite_url)
    with database.write() as connection:
        settings = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
            for name in ("journal_mode", "synchronous", "foreign_keys", "secure_delete")
        }
    assert settings == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "secure_delete": 1}
    database.close()


def test_a_locked_database_fails_in_time_and_works_afterwards(database_url: str) -> None:
    database = open_database(database_url, busy_timeout_s=0.5)
    holds, release = threading.Event(), threading.Event()
    other = open_database(database_url)

    def hold() -> None:
        with other.write() as connection:
            connection.execute(text("UPDATE galleries SET rule = 'held'"))
            holds.set()
            release.wait(20)

    with database.write() as connection:
        connection.execute(insert(galleries), ROW)
    holder = threading.Thread(target=hold)
    holder.start()
    holds.wait(20)
    started = time.monotonic()
    with pytest.raises(StoreUnavailable, match="locked") as caught, database.write() as connection:
        connection.execute(text("UPDATE galleries SET rule = 'late'"))
    assert 0.4 < time.monotonic() - started < 1.5
    assert "UPDATE" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert count_galleries(database) == 1  # readers do not wait
    release.set()
    holder.join()
    with database.write() as connection:
        connection.execute(text("UPDATE galleries SET rule = 'later'"))
    other.close()
    database.close()


def test_a_lock_that_is_soon_released_is_waited_for(sqlite_url: str, tmp_path: Path) -> None:
    database = open_database(sqlite_url, busy_timeout_s=5)
    other = sqlite3.connect(tmp_path / "roadmatch.db", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    release = threading.Timer(0.5, other.rollback)
    release.start()
    with database.write() as connection:
        connection.execute(insert(galleries), ROW)
    release.join()
    other.close()
    database.close()


def test_opening_waits_for_another_process_that_is_making_the_file(sqlite_url: str, tmp_path: Path) -> None:
    other = sqlite3.connect(tmp_path / "roadmatch.db", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")  # SQLite refuses the write-ahead log at once then, without its timeout
    release = threading.Timer(0.5, other.rollback)
    release.start()
    open_database(sqlite_url).close()
    release.join()
    other.close()


def test_threads_behind_a_lock_do_not_wait_one_after_the_other(sqlite_url: str, tmp_path: Path) -> None:
    database = open_database(sqlite_url, busy_timeout_s=0.8)
    waited_s: list[float] = []

    def write() -> None:
        started = time.monotonic()
        with pytest.raises(StoreUnavailable), database.write() as connection:
            connection.execute(insert(galleries), ROW)
        waited_s.append(time.monotonic() - started)

    with sqlite_locked(str(tmp_path / "roadmatch.db")):
        threads = [threading.Thread(target=write) for _ in range(4)]
        for thread in threads:
            thread.start()
            time.sleep(0.1)
        for thread in threads:
            thread.join()
    assert len(waited_s) == 4
    assert max(waited_s) < 1.2
    assert count_galleries(database) == 0
    database.close()


def test_a_slow_statement_is_ended(postgres_url: str) -> None:
    database = open_database(postgres_url, busy_timeout_s=0.2)
    with pytest.raises(StoreUnavailable, match="took too long"), database.read() as connection:
        connection.execute(text("SELECT pg_sleep(20)"))
    with database.write(long=True) as connection:
        connection.execute(text("SELECT pg_sleep(1.2)"))
    database.close()


def test_a_stopped_server_is_unavailable_until_it_is_started(
    postgres_url: str, postgres_server: PostgresServer
) -> None:
    database = open_database(postgres_url)
    try:
        with database.write() as connection:
            connection.execute(insert(galleries), ROW)
        with pytest.raises(StoreUnavailable):
            write_two(database, between=postgres_server.stop)
        for ask in (database.ping, lambda: count_galleries(database)):
            started = time.monotonic()
            with pytest.raises(StoreUnavailable, match="does not answer"):
                ask()
            assert time.monotonic() - started < 3
    finally:
        postgres_server.start()
    assert count_galleries(database) == 1
    database.close()


def test_connections_that_the_server_ended_are_replaced(postgres_url: str, postgres_server: PostgresServer) -> None:
    database = open_database(postgres_url)
    assert count_galleries(database) == 0
    with psycopg.connect(postgres_server.url(), autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'roadmatch'"
        )
    assert count_galleries(database) == 0
    database.close()


def test_a_full_disk_is_storage_full_and_undone(sqlite_url: str) -> None:
    database = open_database(sqlite_url)
    with database.write() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StorageFull), database.write() as connection:
        connection.execute(insert(galleries), [ROW | {"name": f"g{i}", "bundle": "x" * 160} for i in range(100)])
    assert count_galleries(database) == 0
    database.close()


def test_a_mistake_of_ours_is_not_called_unavailable(database: Database) -> None:
    with pytest.raises((OperationalError, ProgrammingError)), database.read() as connection:
        connection.execute(text("SELECT * FROM no_such_table"))


@pytest.mark.parametrize("busy_timeout_s", [0.3, pytest.param(None, marks=pytest.mark.faults)])
def test_every_connection_busy_is_unavailable_and_no_hang(database_url: str, busy_timeout_s: float | None) -> None:
    database = open_database(database_url, busy_timeout_s=busy_timeout_s)
    held = [database.read() for _ in range(40)]
    for read in held:
        read.__enter__()
    started = time.monotonic()
    with pytest.raises(StoreUnavailable, match="no free connection"):
        database.ping()
    assert time.monotonic() - started < (5.5 if database_url.startswith("sqlite") else 3)
    for read in held:
        read.__exit__(None, None, None)
    database.ping()
    database.close()


def test_an_sqlite_file_that_cannot_be_used_is_named_unavailable(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="cannot be opened"):
        open_database(f"sqlite:///{tmp_path}/no/such/folder/roadmatch.db")
    (tmp_path / "text.db").write_text("not a database " * 1000)
    with pytest.raises(StoreUnavailable, match="not an SQLite file"):
        open_database(f"sqlite:///{tmp_path}/text.db")


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "mysql://root@localhost/x", "roadmatch.db", ""])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="database"):
        open_database(url)


def test_a_missing_driver_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(ValueError, match=r"roadmatch\[postgres\]"):
        open_database("postgresql://localhost/x")


def test_a_checkpoint_empties_the_log_unless_a_reader_is_in_the_way(sqlite_url: str, tmp_path: Path) -> None:
    database = open_database(sqlite_url)
    log = tmp_path / "roadmatch.db-wal"
    with database.read(snapshot=True) as reader:
        reader.execute(select(galleries)).all()
        with database.write() as connection:
            connection.execute(insert(galleries), ROW)
        assert not database.checkpoint()
        assert log.stat().st_size > 0
    assert database.checkpoint()
    assert log.stat().st_size == 0
    database.close()
