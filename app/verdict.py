"""The service's answers as the command line and the demo read and show them."""

from collections.abc import Sequence
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from app.client import Answer, ClientError
from app.terminal import aligned


class Answered(BaseModel):
    """What is needed of an answer; answers may grow."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    @classmethod
    def of(cls, answer: Answer) -> Self:
        """Raises ClientError where the answer does not have it."""
        try:
            return cls.model_validate(answer)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise ClientError(
                f"the answer is not that of Roadmatch ({where}: {first['msg']}): is it another version?"
            ) from error


class Hit(Answered):
    """An item with its best image."""

    item: str
    image: str
    similarity: float
    score: float
    margin: float


class Rate(Answered):
    """A share of searches with its 95 % bounds, where there are any."""

    value: float
    low: float | None
    high: float | None


class Evidence(Answered):
    """What the rates were measured on."""

    pictures: int
    searches_with_match: int
    searches_without_match: int
    recall: Rate
    false_match_rate: Rate


class StatedRate(Answered):
    """How often such answers are wrong."""

    evidence: Evidence
    promise: str


class Stated(Answered):
    """What stands behind a decision; a caller's own threshold has no rule and no rate."""

    threshold: float
    operating_point: str | None
    calibration: str
    stated_rate: StatedRate | None
    gallery: str | None
    gallery_size: int


class Verdict(Stated):
    """A search's answer."""

    decision: str
    best_score: float | None
    matches: tuple[Hit, ...]
    near_misses: tuple[Hit, ...]
    matches_truncated: bool

    @property
    def best(self) -> Hit | None:
        """The best item; None in an empty gallery."""
        return next(iter(self.matches + self.near_misses), None)


class Comparison(Stated):
    """A comparison's answer."""

    decision: str
    similarity: float
    score: float
    margin: float


class GalleryRow(Answered):
    """A gallery as it is listed."""

    name: str
    items: int
    images: int
    rule: str
    threshold: float
    calibration: str
    bundle: str
    stated_rate: StatedRate | None


class ItemRow(Answered):
    """An item as it was written."""

    id: str
    images: tuple[Any, ...]


class Written(Answered):
    """What a write did."""

    outcome: str
    item: ItemRow


def search_lines(verdict: Verdict) -> list[str]:
    """Decision, numbers and promise, then the items as a table."""
    best = verdict.best
    where = f"gallery {verdict.gallery}, {_items(verdict.gallery_size)}"
    if best is None:
        head = [f"{verdict.decision}  ({where}: it is empty)", f"threshold {verdict.threshold:.6f}{_rule(verdict)}"]
        return [*head, *_behind(verdict)]
    named = f" {best.item}" if verdict.matches else ""
    head = [
        f"{verdict.decision}{named}  ({where})",
        _numbers(best.score, verdict.threshold, best.margin) + _rule(verdict),
    ]
    rows: list[tuple[str, ...]] = [("", "item", "score", "margin", "similarity", "image")]
    rows += [_row("match", hit) for hit in verdict.matches] + [_row("near miss", hit) for hit in verdict.near_misses]
    more = ["more items match: --top-k shows them"] if verdict.matches_truncated else []
    return [*head, *_behind(verdict), *aligned(rows, right=(2, 3, 4)), *more]


def compare_lines(found: Comparison) -> list[str]:
    """Decision, numbers and promise."""
    return [
        f"{found.decision}  (similarity {found.similarity:.6f})",
        _numbers(found.score, found.threshold, found.margin) + _rule(found),
        *_behind(found),
    ]


def gallery_lines(galleries: Sequence[GalleryRow]) -> list[str]:
    """Galleries as a table."""
    if not galleries:
        return ["no galleries: `roadmatch add FILE... --gallery NAME` makes one"]
    rows = [("gallery", "items", "images", "rule", "threshold", "calibration", "bundle")]
    rows += [
        (row.name, str(row.items), str(row.images), row.rule, f"{row.threshold:.6f}", row.calibration, row.bundle)
        for row in galleries
    ]
    return aligned(rows, right=(1, 2, 4))


def warning(calibration: str) -> list[str]:
    """A line where a gallery's own images contradict the stated rate."""
    if calibration != "does_not_fit":
        return []
    return ["warning: calibration does_not_fit: the gallery's own images suggest far more false matches than is stated"]


def _behind(stated: Stated) -> list[str]:
    promise = [] if stated.stated_rate is None else [stated.stated_rate.promise]
    return promise + warning(stated.calibration)


def _rule(stated: Stated) -> str:
    return f"  rule {stated.operating_point}" if stated.operating_point else "  (your own threshold: no rate is stated)"


def _numbers(score: float, threshold: float, margin: float) -> str:
    return f"score {score:.6f}  threshold {threshold:.6f}  margin {margin:+.6f}"


def _row(kind: str, hit: Hit) -> tuple[str, ...]:
    return kind, hit.item, f"{hit.score:.6f}", f"{hit.margin:+.6f}", f"{hit.similarity:.6f}", hit.image


def _items(count: int) -> str:
    return "1 item" if count == 1 else f"{count} items"
