import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from roadmatch.errors import IdempotencyMismatch, JobFinished, JobNotFound, LeaseLost
from roadmatch.jobs import queue
from roadmatch.jobs.queue import Claim, Failure, Job, Kind, Load, Progress, State
from roadmatch.store.database import Database

Submit = Callable[..., Job]


@pytest.fixture
def submit(database: Database) -> Submit:
    """A maker of jobs."""

    def make(**given: object) -> Job:
        return queue.submit(database, Kind.IMPORT, 1, "birds", {"kind": "zip", "upload": "a"}, **given)  # type: ignore[arg-type]

    return make


def claimed(database: Database, **given: float) -> Claim:
    claim = queue.claim(database, **given)
    assert claim is not None
    return claim


def advance(database: Database, claim: Claim, **given: object) -> Job:
    with database.write() as connection:
        return queue.advance(connection, claim, Progress(**given))  # type: ignore[arg-type]


def test_a_job_goes_from_the_queue_to_its_end(database: Database, submit: Submit) -> None:
    job = submit()
    assert (job.state, job.position, job.total, job.source["upload"]) == (State.QUEUED, 0, None, "a")
    claim = claimed(database)
    assert (claim.job.id, claim.job.state) == (job.id, State.RUNNING)
    assert queue.claim(database) is None
    queue.count(database, claim, 5)
    moved = advance(database, claim, done=2, unchanged=1, failures=[Failure(1, "cat.jpg", "unreadable-image", "cut")])
    assert (moved.position, moved.done, moved.unchanged, moved.failed, moved.total) == (4, 2, 1, 1, 5)
    queue.finish(database, claim, State.SUCCEEDED)
    ended = queue.get(database, job.id)
    assert (ended.state, ended.position) == (State.SUCCEEDED, 4)
    assert ended.started_at is not None
    assert ended.finished_at is not None
    assert queue.failures(database, job.id) == [Failure(1, "cat.jpg", "unreadable-image", "cut")]
    assert queue.claim(database) is None


def test_one_of_many_workers_gets_a_job(database: Database, submit: Submit) -> None:
    jobs = {submit().id for _ in range(6)}
    with ThreadPoolExecutor(8) as workers:
        claims = list(workers.map(lambda _: queue.claim(database), range(16)))
    got = [claim.job.id for claim in claims if claim]
    assert len(got) == len(set(got))
    while (late := queue.claim(database)) is not None:  # a claim may step back from one that another is taking
        got.append(late.job.id)
    assert sorted(got) == sorted(jobs)


def test_a_job_whose_lease_ran_out_is_taken_up_where_it_stood(database: Database, submit: Submit) -> None:
    submit()
    dead = claimed(database, lease_s=30)
    advance(database, dead, done=3)
    with database.write() as connection:
        queue.advance(connection, dead, Progress(), lease_s=-1)
    alive = claimed(database)
    assert (alive.job.id, alive.job.position) == (dead.job.id, 3)
    assert alive.fence > dead.fence


def test_a_worker_that_lost_its_job_can_change_nothing(database: Database, submit: Submit) -> None:
    job = submit()
    dead = claimed(database, lease_s=-1)
    alive = claimed(database)
    for use in (
        lambda: advance(database, dead, done=1),
        lambda: queue.renew(database, dead),
        lambda: queue.count(database, dead, 9),
        lambda: queue.finish(database, dead, State.SUCCEEDED),
        lambda: queue.release(database, dead),
    ):
        with pytest.raises(LeaseLost, match=job.id):
            use()
    found = queue.get(database, job.id)
    assert (found.state, found.position, found.total) == (State.RUNNING, 0, None)
    assert advance(database, alive, done=1).position == 1


def test_a_renewed_lease_keeps_the_job(database: Database, submit: Submit) -> None:
    submit()
    claim = claimed(database, lease_s=0.05)
    assert queue.renew(database, claim, lease_s=30) is False
    threading.Event().wait(0.1)
    assert queue.claim(database) is None


def test_a_job_that_ends_its_workers_is_failed_after_three_attempts(database: Database, submit: Submit) -> None:
    job = submit()
    for _ in range(queue.MOST_ATTEMPTS):
        claimed(database, lease_s=-1)
    assert queue.claim(database) is None
    failed = queue.get(database, job.id)
    assert failed.state is State.FAILED
    assert "3 times at entry 0" in (failed.error or "")


def test_getting_on_forgives_earlier_attempts(database: Database, submit: Submit) -> None:
    submit()
    for _ in range(2 * queue.MOST_ATTEMPTS):
        claim = claimed(database, lease_s=30)
        with database.write() as connection:
            queue.advance(connection, claim, Progress(done=1), lease_s=-1)
    assert claimed(database).job.position == 2 * queue.MOST_ATTEMPTS


def test_jobs_that_have_had_less_go_first_and_priority_goes_before_all(database: Database, submit: Submit) -> None:
    large = submit()
    claim = claimed(database)
    advance(database, claim, done=500)
    assert not queue.others_turn(database, claim, 500)
    small, urgent = submit(), submit(priority=5)
    assert queue.others_turn(database, claim, 500)
    queue.release(database, claim)
    assert [claimed(database).job.id for _ in range(3)] == [urgent.id, small.id, large.id]


def test_a_large_job_does_not_make_room_for_one_of_lower_priority(database: Database, submit: Submit) -> None:
    submit(priority=1)
    claim = claimed(database)
    submit(priority=0)
    assert not queue.others_turn(database, claim, 500)


def test_a_queued_job_is_cancelled_at_once_and_a_repeat_changes_nothing(database: Database, submit: Submit) -> None:
    job = submit()
    assert queue.cancel(database, job.id).state is State.CANCELLED
    assert queue.cancel(database, job.id).state is State.CANCELLED
    assert queue.claim(database) is None


def test_a_running_job_learns_that_it_is_cancelled(database: Database, submit: Submit) -> None:
    job = submit()
    claim = claimed(database)
    assert queue.cancel(database, job.id).state is State.RUNNING
    assert queue.renew(database, claim)
    assert advance(database, claim, done=1).cancel
    queue.finish(database, claim, State.CANCELLED)
    assert queue.get(database, job.id).state is State.CANCELLED


def test_a_job_of_a_dead_worker_is_cancelled_at_once(database: Database, submit: Submit) -> None:
    job = submit()
    dead = claimed(database, lease_s=-1)
    assert queue.cancel(database, job.id).state is State.CANCELLED
    with pytest.raises(LeaseLost):
        advance(database, dead, done=1)


def test_a_cancelled_job_that_was_given_back_is_not_taken_up(database: Database, submit: Submit) -> None:
    job = submit()
    claim = claimed(database)
    queue.cancel(database, job.id)
    queue.release(database, claim)
    assert queue.claim(database) is None
    assert queue.get(database, job.id).state is State.CANCELLED


def test_what_has_ended_cannot_be_cancelled(database: Database, submit: Submit) -> None:
    job = submit()
    queue.finish(database, claimed(database), State.FAILED, "no such folder")
    with pytest.raises(JobFinished, match="has failed already"):
        queue.cancel(database, job.id)
    assert queue.get(database, job.id).error == "no such folder"


def test_an_idempotency_key_gives_the_job_that_is_there(database: Database, submit: Submit) -> None:
    first = submit(key="k", request="a" * 64)
    assert submit(key="k", request="a" * 64).id == first.id
    with pytest.raises(IdempotencyMismatch, match="k was used for another job"):
        submit(key="k", request="b" * 64)
    assert submit().id != first.id


def test_jobs_are_listed_from_the_newest_on(database: Database, submit: Submit) -> None:
    made = [submit().id for _ in range(5)]
    assert sorted(made) == made or len(set(made)) == 5
    page = queue.list_(database, limit=2)
    rest = queue.list_(database, after=page[-1].id, limit=10)
    assert [job.id for job in (*page, *rest)] == sorted(made, reverse=True)
    assert queue.list_(database, gallery="fish", limit=10) == []
    assert len(queue.list_(database, state=State.QUEUED, limit=10)) == 5


def test_a_cancelled_job_whose_worker_died_ends_without_any_worker(database: Database, submit: Submit) -> None:
    job, other = submit(), submit()
    claim = claimed(database)
    assert claim.job.id == job.id
    queue.cancel(database, job.id)
    assert queue.end_cancelled(database) == 0  # its worker lives
    with database.write() as connection:
        queue.advance(connection, claim, Progress(), lease_s=-1)
    assert queue.end_cancelled(database) == 1
    assert queue.get(database, job.id).state is State.CANCELLED
    assert queue.get(database, other.id).state is State.QUEUED
    with pytest.raises(LeaseLost):
        advance(database, claim, done=1)


def test_the_queue_tells_its_load(database: Database, submit: Submit) -> None:
    assert queue.load(database) == Load(dict.fromkeys(State, 0), 0, 0, 0, None)
    first, second, third = submit(), submit(), submit()
    claim = claimed(database)
    advance(database, claim, done=5, unchanged=2, failures=[Failure(7, "a", "bad", "no")])
    queue.finish(database, claim, State.SUCCEEDED)
    advance(database, claimed(database), done=1)
    load = queue.load(database)
    assert load.jobs == {State.QUEUED: 1, State.RUNNING: 1, State.SUCCEEDED: 1, State.FAILED: 0, State.CANCELLED: 0}
    assert (load.done, load.unchanged, load.failed) == (6, 2, 1)
    waits = next(job for job in (first, second, third) if queue.get(database, job.id).state is State.QUEUED)
    assert load.waiting_since == waits.created_at


def test_failures_come_page_by_page_and_hold_what_a_database_takes(database: Database, submit: Submit) -> None:
    job = submit()
    bad = [Failure(n, f"name {n}\0\ud800" + "x" * 600, "bad", "no\0") for n in range(5)]
    advance(database, claimed(database), failures=bad)
    first = queue.failures(database, job.id, limit=3)
    assert [one.position for one in first] == [0, 1, 2]
    assert [one.position for one in queue.failures(database, job.id, after=2)] == [3, 4]
    assert first[0].name.startswith("name 0")
    assert len(first[0].name) == 512
    assert first[0].detail == "no"


def test_a_job_that_is_not_there_is_named(database: Database) -> None:
    for use in (queue.get, queue.cancel, queue.failures):
        with pytest.raises(JobNotFound, match="no job 17"):
            use(database, "17")
