"""Tells Celery workers, through Redis, that there is a job: as far as that can be done, and nobody waits for it."""

import logging
import queue
import threading
import time
from contextlib import closing, suppress

TASK, QUEUE = "roadmatch.wake_up", "roadmatch"
"""What worker/celery_app.py and worker/tasks.py call them; programs do not import each other."""
_TIMEOUT_S = 0.8
"""Of one look for Redis; there are two at most, so a message takes less than 2 s in all."""
_MOST_WAITING = 64
_COMPLAIN_S = 60.0
log = logging.getLogger("roadmatch.broker")


class Broker:
    """Sends messages on a thread of its own. One that is lost costs seconds: workers look for jobs themselves, too."""

    def __init__(self, url: str) -> None:
        """Opens no connection. Raises ModuleNotFoundError without the extra `celery`."""
        from celery import Celery  # here, since a service without a broker needs none

        self._celery = Celery(broker=url, set_as_current=False)
        self._celery.conf.update(
            task_ignore_result=True,
            task_publish_retry_policy={"max_retries": 1, "interval_start": 0, "interval_step": 0, "interval_max": 0},
            broker_transport_options={
                "socket_timeout": _TIMEOUT_S,
                "socket_connect_timeout": _TIMEOUT_S,
                "max_retries": 0,  # of the connection, inside of each publish
            },
        )
        self._messages: queue.Queue[bool] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._send_all, name="broker", daemon=True)
        self._thread.start()

    def wake_up(self) -> None:
        """There is a new job; returns at once and raises nothing."""
        with suppress(queue.Full):  # as many messages as that wake every worker there is
            self._messages.put_nowait(True)

    def close(self) -> None:
        """Send what waits, if Redis answers, and come back within 2.5 s."""
        with suppress(queue.Full):
            self._messages.put(False, timeout=0.5)
            self._thread.join(2.0)

    def _send_all(self) -> None:
        with closing(self._celery):  # on this thread, which may outlast the wait for it
            self._send_messages()

    def _send_messages(self) -> None:
        complained = -_COMPLAIN_S
        while self._messages.get():
            try:
                self._celery.send_task(TASK, queue=QUEUE)
            except Exception as error:
                if time.monotonic() - complained >= _COMPLAIN_S:
                    complained = time.monotonic()
                    log.warning("the broker does not answer, so workers find new jobs some seconds later: %s", error)
