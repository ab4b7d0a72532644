"""What the service counts, for Prometheus; labels hold no names, ids or texts of callers."""

from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from roadmatch.gallery.search import Answer
from roadmatch.jobs.queue import Load

_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")
_SCORES = tuple(step / 10 for step in range(-2, 11))


class Metrics:
    """The counters of one service; each has its own registry, so that two in a process do not mix."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        own = self._registry
        self._requests = Counter(
            "roadmatch_requests", "Requests answered.", ["method", "route", "status"], registry=own
        )
        self._seconds = Histogram(
            "roadmatch_request_seconds",
            "From a request's head to its answer.",
            ["route"],
            buckets=_SECONDS,
            registry=own,
        )
        self.refused = Counter(
            "roadmatch_refused_requests", "Requests answered 503 before their body was read.", registry=own
        )
        self.inside = Gauge(
            "roadmatch_admitted_requests", "Requests with a body that are being served or wait.", registry=own
        )
        self.encoded = Counter("roadmatch_encoded_images", "Pictures decoded and embedded.", registry=own)
        self._decisions = Counter("roadmatch_decisions", "Searches answered.", ["decision"], registry=own)
        self._scores = Histogram("roadmatch_best_score", "Best score of each search.", buckets=_SCORES, registry=own)
        Info("roadmatch_build", "What runs.", registry=own).info({"version": version("roadmatch")})

    def served(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count an answered request."""
        self._requests.labels(method if method in _METHODS else "other", route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def searched(self, answer: Answer) -> None:
        """Count a search's answer."""
        self._decisions.labels(answer.decision.value).inc()
        if answer.best_score is not None:
            self._scores.observe(answer.best_score)

    def text(self, load: Load | None) -> bytes:
        """All of it in Prometheus' text format. load: of the job queue; None where the database does not tell."""
        return generate_latest(self._registry) + (b"" if load is None else generate_latest(_Jobs(load)))


class _Jobs(Collector):
    """The job queue, which all processes share: the same figures from each."""

    def __init__(self, load: Load) -> None:
        self._load = load

    def collect(self) -> Iterator[Metric]:
        """Jobs by state, the oldest one's age, entries by outcome."""
        load = self._load
        jobs = GaugeMetricFamily("roadmatch_jobs", "Jobs in the database.", labels=["state"])
        for state, count in load.jobs.items():
            jobs.add_metric([state.value], count)
        yield jobs
        age = (datetime.now(UTC) - load.waiting_since).total_seconds() if load.waiting_since else 0.0
        yield GaugeMetricFamily(
            "roadmatch_oldest_queued_job_seconds", "Since the oldest queued job was sent; 0: none.", max(age, 0.0)
        )
        entries = CounterMetricFamily("roadmatch_job_entries", "Entries of jobs that are finished.", labels=["outcome"])
        for outcome, count in (("done", load.done), ("unchanged", load.unchanged), ("failed", load.failed)):
            entries.add_metric([outcome], count)
        yield entries
