"""Items and their images: add, replace, get, list, delete."""

import json
from collections.abc import Callable
from datetime import datetime
from functools import partial
from hashlib import sha256
from typing import Annotated, Literal, Self

import anyio
from fastapi import APIRouter, Header, Query, Response, UploadFile
from fastapi import Form as FormBody
from pydantic import BaseModel

from app.forms import NO_REPEATS, GalleryName, IdempotencyKey, ImageId, ImagesForm, ItemForm, ItemId, Version, invalid
from app.routes.wiring import ServiceDep, failures, from_cursor, to_cursor
from app.service import Service
from roadmatch.errors import IdempotencyMismatch, VersionMismatch
from roadmatch.gallery import galleries, items
from roadmatch.gallery.galleries import Gallery
from roadmatch.gallery.items import Absent, Item, NewImage, Outcome, Put, StoredImage
from roadmatch.images import reencode

router = APIRouter(tags=["Items"])
_MULTIPART = FormBody(media_type="multipart/form-data")
_THUMB_SIDE = 320
_OnlyNew = Annotated[Literal["*"] | None, Header(description="`*`: the item must not be there yet")]


class ImageView(BaseModel):
    """An image of an item; `url` is null where the gallery keeps no pictures."""

    id: str
    sha256: str
    format: str
    width: int
    height: int
    bytes: int
    url: str | None
    created_at: datetime


class ItemView(BaseModel):
    """An item with its images; version changes with every visible change."""

    id: str
    gallery: str
    label: str | None
    metadata: dict[str, str | int | float | bool | None]
    version: int
    images: list[ImageView]
    created_at: datetime
    updated_at: datetime

    @classmethod
    def of(cls, gallery: Gallery, item: Item) -> Self:
        """The item as it goes out."""
        return cls(
            id=item.id,
            gallery=gallery.name,
            label=item.label,
            metadata=dict(item.metadata),
            version=item.version,
            images=[_image_view(gallery, image) for image in item.images],
            created_at=item.created_at,
            updated_at=item.updated_at,
        )


class Written(BaseModel):
    """What a write did, and the item as it is now."""

    outcome: Outcome
    item: ItemView


class ItemList(BaseModel):
    """A page of items by id; next_cursor is null on the last."""

    items: list[ItemView]
    next_cursor: str | None


@router.put(
    "/v1/galleries/{gallery}/items/{item}",
    response_model=Written,
    responses={201: {"model": Written}, **failures(404, 409, 412, 413, 415, 422, 503, 507)},
    dependencies=[NO_REPEATS],
)
async def put_item(
    gallery: GalleryName,
    item: ItemId,
    form: Annotated[ItemForm, _MULTIPART],
    response: Response,
    service: ServiceDep,
    if_match: Version = None,
    if_none_match: _OnlyNew = None,
) -> Written:
    """Add an item under your id, or replace it; an image that it has already keeps its id."""
    if if_match and if_none_match:
        raise invalid("If-None-Match", "give it or If-Match, not both", "header")
    found, images = await _new_images(service, gallery, form.image)
    expect = Absent.ABSENT if if_none_match else _version(found, if_match)
    write = partial(
        items.put,
        service.store,
        found,
        item,
        label=form.label,
        metadata=form.metadata,
        images=images,
        expect_version=expect,
    )
    return await _written(service, found, response, write)


@router.post(
    "/v1/galleries/{gallery}/items",
    response_model=Written,
    status_code=201,
    responses={200: {"model": Written}, **failures(404, 413, 415, 422, 503, 507)},
    dependencies=[NO_REPEATS],
)
async def add_item(
    gallery: GalleryName,
    form: Annotated[ItemForm, _MULTIPART],
    response: Response,
    service: ServiceDep,
    idempotency_key: IdempotencyKey = None,
) -> Written:
    """Add an item under an id of ours; with an Idempotency-Key a repeat finds the item and adds none."""
    found, images = await _new_images(service, gallery, form.image)
    item = _id_of_key(found, idempotency_key) if idempotency_key else items.new_id()

    def write() -> Put:
        try:
            return items.put(
                service.store,
                found,
                item,
                label=form.label,
                metadata=form.metadata,
                images=images,
                expect_version=Absent.ABSENT,
            )
        except VersionMismatch:
            return Put(_same(items.get(service.store, found, item), form, images), Outcome.UNCHANGED)

    return await _written(service, found, response, write)


@router.get("/v1/galleries/{gallery}/items", response_model=ItemList, responses=failures(404, 422, 503))
def list_items(
    gallery: GalleryName,
    service: ServiceDep,
    cursor: Annotated[str | None, Query(max_length=256)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> ItemList:
    """Items by id."""
    found = galleries.get(service.database, gallery)
    page = items.list_(service.store, found, after=from_cursor(cursor), limit=limit + 1)
    return ItemList(
        items=[ItemView.of(found, item) for item in page[:limit]],
        next_cursor=to_cursor(page[limit - 1].id) if len(page) > limit else None,
    )


@router.get("/v1/galleries/{gallery}/items/{item}", response_model=ItemView, responses=failures(404, 422, 503))
def get_item(gallery: GalleryName, item: ItemId, response: Response, service: ServiceDep) -> ItemView:
    """An item with its images."""
    found = galleries.get(service.database, gallery)
    stored = items.get(service.store, found, item)
    response.headers["ETag"] = _etag(found, stored)
    return ItemView.of(found, stored)


@router.delete("/v1/galleries/{gallery}/items/{item}", status_code=204, responses=failures(404, 412, 422, 503))
async def delete_item(gallery: GalleryName, item: ItemId, service: ServiceDep, if_match: Version = None) -> None:
    """The item with its pictures and embeddings; it is in no answer after this one."""

    def delete() -> None:
        found = galleries.get(service.database, gallery)
        items.delete(service.store, found, item, expect_version=_version(found, if_match))

    await service.on_a_writer(delete)


@router.post(
    "/v1/galleries/{gallery}/items/{item}/images",
    response_model=Written,
    responses=failures(404, 409, 412, 413, 415, 422, 503, 507),
    dependencies=[NO_REPEATS],
)
async def add_images(
    gallery: GalleryName,
    item: ItemId,
    form: Annotated[ImagesForm, _MULTIPART],
    response: Response,
    service: ServiceDep,
    if_match: Version = None,
) -> Written:
    """More images of an item; one that it has already is not doubled."""
    found, images = await _new_images(service, gallery, form.image)
    write = partial(items.add_images, service.store, found, item, images, expect_version=_version(found, if_match))
    return await _written(service, found, response, write)


@router.delete(
    "/v1/galleries/{gallery}/items/{item}/images/{image}",
    response_model=ItemView,
    responses=failures(404, 409, 412, 422, 503),
)
async def delete_image(
    gallery: GalleryName, item: ItemId, image: ImageId, service: ServiceDep, if_match: Version = None
) -> ItemView:
    """One image of an item; the last one goes with its item only."""

    def delete() -> ItemView:
        found = galleries.get(service.database, gallery)
        left = items.delete_image(service.store, found, item, image, expect_version=_version(found, if_match))
        return ItemView.of(found, left)

    return await service.on_a_writer(delete)


@router.get(
    "/v1/galleries/{gallery}/images/{image}",
    response_class=Response,
    responses={200: {"content": {"image/jpeg": {}, "image/png": {}}}, **failures(404, 422, 503)},
)
async def get_image(
    gallery: GalleryName,
    image: ImageId,
    service: ServiceDep,
    size: Annotated[Literal["full", "thumb"], Query(description="thumb: 320 px at most")] = "full",
) -> Response:
    """The picture, encoded anew without any metadata."""

    def picture() -> tuple[bytes, str]:
        found = galleries.get(service.database, gallery)
        data, _ = items.read_picture(service.store, found, image)
        return reencode(data, longest_side=_THUMB_SIDE if size == "thumb" else None)

    content, media_type = await service.on_a_core(picture)
    safe = {"Content-Security-Policy": "default-src 'none'; sandbox", "Cache-Control": "private, no-cache"}
    return Response(content, media_type=media_type, headers=safe)


async def _new_images(service: Service, name: str, pictures: list[UploadFile]) -> tuple[Gallery, list[NewImage]]:
    """The gallery, and the pictures embedded by its bundle, as many at a time as there are cores."""
    gallery = await service.on_a_core(partial(galleries.get, service.database, name))
    results: dict[int, NewImage] = {}

    async def one(number: int, upload: UploadFile) -> None:
        results[number] = await service.on_a_core(lambda: service.new_image(gallery.bundle, upload.file.read()))

    try:
        async with anyio.create_task_group() as tasks:
            for number, upload in enumerate(pictures):
                tasks.start_soon(one, number, upload)
    except ExceptionGroup as group:
        raise group.exceptions[0] from group
    return gallery, [results[number] for number in range(len(pictures))]


async def _written(service: Service, gallery: Gallery, response: Response, write: Callable[[], Put]) -> Written:
    put = await service.on_a_writer(write)
    response.status_code = 201 if put.outcome is Outcome.CREATED else 200
    response.headers["ETag"] = _etag(gallery, put.item)
    response.headers["Location"] = f"/v1/galleries/{gallery.name}/items/{put.item.id}"
    return Written(outcome=put.outcome, item=ItemView.of(gallery, put.item))


def _id_of_key(gallery: Gallery, key: str) -> str:
    """An id that only this key has in this gallery, so that the item itself remembers the request."""
    return sha256(json.dumps([gallery.id, key]).encode()).hexdigest()[:24]


def _same(item: Item, form: ItemForm, images: list[NewImage]) -> Item:
    """The item, if the repeated request brings what it was made of."""
    asked = (form.label, items.spelt(form.metadata), {image.sha256 for image in images})
    if asked != (item.label, items.spelt(item.metadata), {image.sha256 for image in item.images}):
        raise IdempotencyMismatch("the Idempotency-Key was used for another item: use a new key")
    return item


def _etag(gallery: Gallery, item: Item) -> str:
    """Versions are counted within a gallery, and one that is deleted and made again has another id."""
    return f'"{gallery.id}-{item.version}"'


def _version(gallery: Gallery, etag: str | None) -> int | None:
    """The version that an If-Match asks for; one of another gallery is never there."""
    if etag is None:
        return None
    of_gallery, version = etag.strip('"').split("-")
    return int(version) if int(of_gallery) == gallery.id else -1


def _image_view(gallery: Gallery, image: StoredImage) -> ImageView:
    return ImageView(
        id=image.id,
        sha256=image.sha256,
        format=image.format,
        width=image.width,
        height=image.height,
        bytes=image.bytes,
        url=None if image.blob is None else f"/v1/galleries/{gallery.name}/images/{image.id}",
        created_at=image.created_at,
    )
