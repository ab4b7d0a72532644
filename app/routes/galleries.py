"""Galleries: make, list, look at, change, delete."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, Field

from app.answers import StatedRate, stated_rate
from app.forms import GalleryChange, GalleryName, NewGallery
from app.routes.wiring import ServiceDep, failures, from_cursor, to_cursor
from app.service import Service
from roadmatch.errors import BundleNotFound, RuleError
from roadmatch.gallery import galleries
from roadmatch.gallery.galleries import Gallery, Keep
from roadmatch.gallery.self_check import Calibration

router = APIRouter(tags=["Galleries"])
_JSON_BYTES = 65_536
Limit = Annotated[int, Query(ge=1, le=1000)]
Cursor = Annotated[str | None, Query(max_length=256)]


class GalleryView(BaseModel):
    """A gallery with what is known of its rule."""

    name: str
    bundle: str
    rule: str
    keep: Keep
    items: int
    images: int
    seq: int
    created_at: datetime
    threshold: Annotated[
        float | None, Field(description="null where its bundle is not loaded or its rule reaches no further")
    ]
    calibration: Calibration
    stated_rate: StatedRate | None


class GalleryList(BaseModel):
    """A page of galleries by name; next_cursor is null on the last."""

    galleries: list[GalleryView]
    next_cursor: str | None


@router.post(
    "/v1/galleries",
    max_body_size=_JSON_BYTES,
    status_code=201,
    response_model=GalleryView,
    responses=failures(404, 409, 422, 503),
)
def create_gallery(new: NewGallery, response: Response, service: ServiceDep) -> GalleryView:
    """A new, empty gallery, bound to one bundle."""
    bundle = new.bundle or service.default_bundle
    points = service.points(bundle)
    rule = points.point(new.rule or points.default_rule).rule
    gallery = galleries.create(service.database, new.name, bundle=bundle, rule=rule, keep=new.keep)
    response.headers["Location"] = f"/v1/galleries/{gallery.name}"
    return view(service, gallery)


@router.get("/v1/galleries", response_model=GalleryList, responses=failures(422, 503))
def list_galleries(service: ServiceDep, cursor: Cursor = None, limit: Limit = 100) -> GalleryList:
    """Galleries by name."""
    page = galleries.list_(service.database, after=from_cursor(cursor), limit=limit + 1)
    more = len(page) > limit
    return GalleryList(
        galleries=[view(service, gallery) for gallery in page[:limit]],
        next_cursor=to_cursor(page[limit - 1].name) if more else None,
    )


@router.get("/v1/galleries/{gallery}", response_model=GalleryView, responses=failures(404, 422, 503))
def get_gallery(gallery: GalleryName, service: ServiceDep) -> GalleryView:
    """Size, rule, expected and self-checked rates."""
    return view(service, galleries.get(service.database, gallery))


@router.patch(
    "/v1/galleries/{gallery}", max_body_size=_JSON_BYTES, response_model=GalleryView, responses=failures(404, 422, 503)
)
def change_gallery(gallery: GalleryName, change: GalleryChange, service: ServiceDep) -> GalleryView:
    """Another default rule, or whether pictures are kept from now on."""
    if change.rule is not None:
        service.points(galleries.get(service.database, gallery).bundle).point(change.rule)
    return view(service, galleries.update(service.database, gallery, rule=change.rule, keep=change.keep))


@router.delete("/v1/galleries/{gallery}", status_code=204, responses=failures(404, 422, 503))
async def delete_gallery(gallery: GalleryName, service: ServiceDep) -> None:
    """The gallery with all its items, pictures and embeddings."""

    def delete() -> None:
        found = galleries.get(service.database, gallery)
        galleries.delete(service.database, service.store.blobs, gallery)
        service.forget(found)

    await service.on_a_writer(delete)


def view(service: Service, gallery: Gallery) -> GalleryView:
    """The gallery as it goes out."""
    try:
        point = service.points(gallery.bundle).point(gallery.rule)
        threshold: float | None = point.threshold(gallery.images).value
        calibration, stated = stated_rate(service, gallery, point, gallery.images)
    except (BundleNotFound, RuleError):  # its searches say so; one such gallery must not hide the others
        threshold, calibration, stated = None, Calibration.NOT_CHECKED, None
    return GalleryView(
        name=gallery.name,
        bundle=gallery.bundle,
        rule=gallery.rule,
        keep=gallery.keep,
        items=gallery.items,
        images=gallery.images,
        seq=gallery.seq,
        created_at=gallery.created_at,
        threshold=threshold,
        calibration=calibration,
        stated_rate=stated,
    )
