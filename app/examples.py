"""Requests and answers for the API's documentation, with the rates of the bundle that is served."""

from collections.abc import Mapping
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

from pydantic import BaseModel

from app.answers import BatchAnswer, CompareAnswer, Match, SearchAnswer, StatedRate
from app.problems import Problem, of_error
from app.routes.galleries import GalleryList, GalleryView
from app.routes.items import ImageView, ItemList, ItemView, Written
from app.routes.jobs import FailureList, FailureView, JobList, JobView
from app.service import Service
from roadmatch.errors import UnsupportedImage
from roadmatch.gallery.galleries import Keep
from roadmatch.gallery.items import Outcome
from roadmatch.gallery.search import Decision
from roadmatch.gallery.self_check import Calibration
from roadmatch.jobs.queue import Kind, State

_GALLERY = "shoes"
_SIZE = 1_000
_MADE = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)
_IMAGE = "0c3fa1d2e4b5968778695a4b"
_FILE = "(a picture's bytes)"


def requests() -> Mapping[str, Any]:
    """Schema's name -> example of a body."""
    return {
        "NewGallery": {"name": _GALLERY, "keep": "original"},
        "GalleryChange": {"rule": "max_f1"},
        "ItemIds": {"ids": ["sku-1", "sku-77"]},
        "ItemForm": {"image": [_FILE], "label": "red shoe", "metadata": '{"size": 42}'},
        "ImagesForm": {"image": [_FILE]},
        "SearchForm": {"image": _FILE, "top_k": 2},
        "BatchForm": {"image": [_FILE, _FILE], "top_k": 2},
        "CompareForm": {"query": _FILE, "picture": _FILE, "gallery": _GALLERY},
    }


def answers(service: Service) -> Mapping[type[BaseModel], BaseModel]:
    """Model -> example of an answer."""
    search, item, gallery, problem, job = _search(service), _item(), _gallery(service), _problem(), _job()
    return {
        SearchAnswer: search,
        BatchAnswer: BatchAnswer(answers=[search, problem]),
        CompareAnswer: _compare(service),
        Written: Written(outcome=Outcome.CREATED, item=item),
        ItemView: item,
        ItemList: ItemList(items=[item], next_cursor=None),
        GalleryView: gallery,
        GalleryList: GalleryList(galleries=[gallery], next_cursor=None),
        JobView: job,
        JobList: JobList(jobs=[job], next_cursor=None),
        FailureList: FailureList(failures=[_failure()], next_cursor=None),
        Problem: problem,
    }


def _search(service: Service) -> SearchAnswer:
    rule, threshold, stated = _decided(service)
    match, near_miss = _match(threshold, 0.25, "sku-1"), _match(threshold, -0.15, "sku-77")
    return SearchAnswer(
        decision=Decision.MATCH,
        threshold=threshold,
        operating_point=rule,
        best_score=match.score,
        matches=[match],
        near_misses=[near_miss],
        matches_truncated=False,
        calibration=Calibration.FITS,
        stated_rate=stated,
        gallery=_GALLERY,
        gallery_size=_SIZE,
        bundle=service.default_bundle,
        seq=_SIZE,
    )


def _compare(service: Service) -> CompareAnswer:
    rule, threshold, stated = _decided(service)
    match = _match(threshold, 0.25, "sku-1")
    return CompareAnswer(
        decision=Decision.MATCH,
        similarity=match.similarity,
        score=match.score,
        margin=match.margin,
        threshold=threshold,
        operating_point=rule,
        calibration=Calibration.FITS,
        stated_rate=stated,
        gallery=_GALLERY,
        gallery_size=_SIZE,
        bundle=service.default_bundle,
    )


def _gallery(service: Service) -> GalleryView:
    rule, threshold, stated = _decided(service)
    return GalleryView(
        name=_GALLERY,
        bundle=service.default_bundle,
        rule=rule,
        keep=Keep.ORIGINAL,
        items=_SIZE,
        images=_SIZE,
        seq=_SIZE,
        created_at=_MADE,
        threshold=threshold,
        calibration=Calibration.FITS,
        stated_rate=stated,
    )


def _item() -> ItemView:
    image = ImageView(
        id=_IMAGE,
        sha256=sha256(_FILE.encode()).hexdigest(),
        format="jpeg",
        width=1024,
        height=768,
        bytes=183_245,
        url=f"/v1/galleries/{_GALLERY}/images/{_IMAGE}",
        created_at=_MADE,
    )
    return ItemView(
        id="sku-1",
        gallery=_GALLERY,
        label="red shoe",
        metadata={"size": 42},
        version=1,
        images=[image],
        created_at=_MADE,
        updated_at=_MADE,
    )


def _job() -> JobView:
    return JobView(
        id="019c1422ff80a1b2c3d4e5f6",
        kind=Kind.IMPORT,
        gallery=_GALLERY,
        source="zip",
        state=State.RUNNING,
        priority=0,
        position=640,
        total=_SIZE,
        done=620,
        unchanged=19,
        failed=1,
        error=None,
        cancel_requested=False,
        created_at=_MADE,
        started_at=_MADE,
        finished_at=None,
    )


def _failure() -> FailureView:
    problem = _problem()
    return FailureView(position=17, name="shoes/readme.txt", code=problem.code, detail=problem.detail)


def _problem() -> Problem:
    return of_error(UnsupportedImage("not a format that is read: send JPEG, PNG, WebP, GIF, BMP, TIFF or AVIF"))


def _decided(service: Service) -> tuple[str, float, StatedRate]:
    """The default rule of the default bundle, its threshold in the example's gallery, and its rates there."""
    points = service.points(service.default_bundle)
    point = points.point(points.default_rule)
    return point.rule, point.threshold(_SIZE).value, StatedRate.of(points, point, _SIZE, None)


def _match(threshold: float, margin: float, item: str) -> Match:
    score = round(threshold + margin, 6)
    return Match(item=item, image=_IMAGE, similarity=round(score + 0.1, 6), score=score, margin=margin)
