"""A PostgreSQL connection that gives up on a server that does not answer.

The server's own time limits mean nothing while it is frozen, as a paused virtual machine or container is, and TCP's
keep-alive is answered by its kernel: without a limit on this side, a statement would wait for as long as that lasts.
"""

import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from sqlalchemy import Connection, Engine, event


class ImpatientConnection(psycopg.Connection[Any]):
    """Every wait for the server ends after `answer_s` seconds, with OperationalError and a closed connection."""

    answer_s: float | None = None
    """None waits for ever."""

    def wait(self, gen: Any, *rest: Any, **named: Any) -> Any:
        """What the driver calls for each answer; gen yields whenever it would block."""
        if self.answer_s is not None:
            gen = self._bounded(gen, time.monotonic() + self.answer_s)
        return super().wait(gen, *rest, **named)

    def _bounded(self, gen: Generator[Any, Any, Any], end: float) -> Generator[Any, Any, Any]:
        ready = None
        while True:
            try:
                state = gen.send(ready)
            except StopIteration as done:
                return done.value
            ready = yield state
            if not ready and time.monotonic() > end:  # falsy: the driver looked after a tenth of a second
                gen.close()
                self.pgconn.finish()  # an answer that comes later would be taken for that of another statement
                raise psycopg.OperationalError("the server does not answer")


def give_up_after(engine: Engine, answer_s: float) -> None:
    """Make the engine's connections give up after so many seconds; longer than what the server itself allows."""

    def connect(_: Any, __: Any, arguments: Any, options: Any) -> ImpatientConnection:
        connection = ImpatientConnection.connect(*arguments, **options)
        connection.answer_s = answer_s
        return connection

    event.listen(engine, "do_connect", connect)


@contextmanager
def patience(connection: Connection) -> Iterator[None]:
    """Wait for as long as it takes in the block, whose statements may."""
    driver = connection.connection.driver_connection
    assert isinstance(driver, ImpatientConnection)
    usual, driver.answer_s = driver.answer_s, None
    try:
        yield
    finally:
        driver.answer_s = usual
