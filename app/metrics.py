"""What the service counts, for Prometheus; labels hold no names, ids or texts of callers."""

from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest

from roadmatch.gallery.search import Answer

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

    def text(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self._registry)
