"""Celery as a waker: `celery -A worker.celery_app worker` hears of jobs through Redis, and claims them from SQL.

A message is a hint, so one that is lost, late or doubled changes nothing.
"""

from celery import Celery

from worker.settings import Settings, SettingsError


def make_app(settings: Settings) -> Celery:
    """The Celery application; opens nothing. Raises SettingsError without a broker."""
    if not settings.broker:
        raise SettingsError("ROADMATCH_BROKER is not set: give the Redis URL, as in redis://redis:6379/0")
    app = Celery("roadmatch", broker=settings.broker, include=["worker.tasks"])
    app.conf.update(
        task_default_queue="roadmatch",
        # FAISS and OpenVINO hang in forked children. In this pool Celery's own time limits mean nothing: the task
        # bounds its wait, decoding has killable children, and a job whose worker is gone is free when its lease ends.
        worker_pool="solo",
        worker_concurrency=1,
        worker_prefetch_multiplier=1,
        task_acks_late=True,
        task_reject_on_worker_lost=False,  # a message that ends its worker would go round for ever
        task_ignore_result=True,  # state is in SQL
        accept_content=["json"],
        task_serializer="json",
        worker_cancel_long_running_tasks_on_connection_loss=True,
        worker_soft_shutdown_timeout=20.0,
        broker_transport="worker.redis_transport:Transport",
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,  # for ever
        broker_transport_options={"visibility_timeout": 600, "socket_timeout": 5, "socket_connect_timeout": 2},
    )
    return app


settings = Settings.read()
celery_app = make_app(settings)
