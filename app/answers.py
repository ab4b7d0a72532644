"""The answers to searches and comparisons, as they go out."""

from functools import lru_cache
from typing import Annotated, Self

from pydantic import BaseModel, Field

from app.problems import Problem
from app.service import Service
from roadmatch.gallery.galleries import Gallery
from roadmatch.gallery.search import Answer, Comparison, Decision, Hit
from roadmatch.gallery.self_check import Calibration, SelfCheck
from roadmatch.operating_points import Evidence, OperatingPoint, OperatingPoints, promise


class Match(BaseModel):
    """An item with its best image. margin = score - threshold."""

    item: str
    image: str
    similarity: float
    score: float
    margin: float

    @classmethod
    def of(cls, hit: Hit) -> Self:
        """The hit as it goes out."""
        return cls(item=hit.item, image=hit.image, similarity=hit.similarity, score=hit.score, margin=hit.margin)


class Here(BaseModel):
    """What is expected of a rule in this gallery, by the evidence of the bundle and by the gallery's own images."""

    gallery_images: Annotated[int, Field(description="images, not items: each is one more chance to be wrong")]
    expected_false_match_rate: float
    expected_recall: float
    extrapolated: Annotated[bool, Field(description="the gallery is larger than what the evidence shows by itself")]
    self_checked_false_match_rate: Annotated[
        float | None,
        Field(
            description="an upper estimate from the gallery's own images; null without a check or with too few images"
        ),
    ]
    self_checked_at_most: Annotated[float | None, Field(description="its upper 95 % bound")]


class StatedRate(BaseModel):
    """How often such answers were wrong on pictures not used for fitting, and what that means here."""

    evidence: Evidence
    here: Here
    promise: str

    @classmethod
    def of(cls, points: OperatingPoints, point: OperatingPoint, images: int, check: SelfCheck | None) -> Self:
        """The rates of a point among so many images; check: if the gallery's own images say anything."""
        assert point.evidence is not None
        applied = point.threshold(images)
        here = Here(
            gallery_images=images,
            expected_false_match_rate=_figures(points.curves.expected_false_match_rate(applied.value, images)),
            expected_recall=_figures(points.curves.expected_recall(applied.value)),
            extrapolated=applied.extrapolated,
            self_checked_false_match_rate=None if check is None or check.rate is None else _figures(check.rate),
            self_checked_at_most=None if check is None else _figures(check.high),
        )
        words = promise(points, point, images, None if check is None else check.high)
        return cls(evidence=point.evidence, here=here, promise=words)


class SearchAnswer(BaseModel):
    """Whether the picture is in the gallery, and where."""

    decision: Decision
    threshold: Annotated[float, Field(description="on the score; a score at the threshold is a match")]
    operating_point: Annotated[str | None, Field(description="the rule; null where the request gave a threshold")]
    best_score: Annotated[float | None, Field(description="of the best item; null in an empty gallery")]
    matches: list[Match]
    near_misses: Annotated[list[Match], Field(description="the best items below the threshold")]
    matches_truncated: Annotated[bool, Field(description="more items match than are shown")]
    calibration: Annotated[
        Calibration, Field(description="whether the gallery's own images contradict the stated rate")
    ]
    stated_rate: StatedRate | None
    gallery: str
    gallery_size: int
    bundle: str
    seq: Annotated[int, Field(description="the change of the gallery that the answer includes all up to")]


class BatchAnswer(BaseModel):
    """One entry a picture, in the order sent; all answers are of one generation of the gallery."""

    answers: list[SearchAnswer | Problem]


class CompareAnswer(BaseModel):
    """Whether two pictures show the same thing, by the rule of a gallery or of a bundle."""

    decision: Decision
    similarity: float
    score: float
    margin: float
    threshold: float
    operating_point: str | None
    calibration: Calibration
    stated_rate: StatedRate | None
    gallery: str | None
    gallery_size: int
    bundle: str


def search_answer(service: Service, gallery: Gallery, point: OperatingPoint | None, answer: Answer) -> SearchAnswer:
    """The answer with what stands behind it."""
    calibration, stated = stated_rate(service, gallery, point, answer.gallery_images)
    return SearchAnswer(
        decision=answer.decision,
        threshold=answer.threshold,
        operating_point=None if point is None else point.rule,
        best_score=answer.best_score,
        matches=[Match.of(hit) for hit in answer.matches],
        near_misses=[Match.of(hit) for hit in answer.near_misses],
        matches_truncated=answer.matches_truncated,
        calibration=calibration,
        stated_rate=stated,
        gallery=gallery.name,
        gallery_size=answer.gallery_size,
        bundle=gallery.bundle,
        seq=answer.seq,
    )


def compare_answer(
    service: Service,
    bundle: str,
    gallery: Gallery | None,
    size: tuple[int, int],
    point: OperatingPoint | None,
    threshold: float,
    found: Comparison,
) -> CompareAnswer:
    """The comparison with what stands behind it; size: items and images, 1 and 1 without a gallery."""
    items, images = size
    if gallery is not None:
        calibration, stated = stated_rate(service, gallery, point, images)
    else:
        calibration = Calibration.NOT_CHECKED
        stated = None if point is None else StatedRate.of(service.points(bundle), point, images, None)
    return CompareAnswer(
        decision=found.decision,
        similarity=found.similarity,
        score=found.score,
        margin=found.margin,
        threshold=threshold,
        operating_point=None if point is None else point.rule,
        calibration=calibration,
        stated_rate=stated,
        gallery=None if gallery is None else gallery.name,
        gallery_size=items,
        bundle=bundle,
    )


def stated_rate(
    service: Service, gallery: Gallery, point: OperatingPoint | None, images: int
) -> tuple[Calibration, StatedRate | None]:
    """What the self-check says of a rule in a gallery, and its rates; a caller's own threshold has none."""
    if point is None:
        return Calibration.NOT_CHECKED, None
    calibration, check = service.calibration(gallery, point, images)
    told = None if calibration is Calibration.NOT_CHECKED else check
    return calibration, _rates(service, gallery.bundle, point.rule, images, told)


@lru_cache(maxsize=256)
def _rates(service: Service, bundle: str, rule: str, images: int, check: SelfCheck | None) -> StatedRate:
    """Kept, because hardly any search comes with a new size or check, and words take time."""
    points = service.points(bundle)
    return StatedRate.of(points, points.point(rule), images, check)


def _figures(share: float) -> float:
    return float(f"{share:.3g}")
