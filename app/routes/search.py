"""Search, search-batch and compare."""

from functools import partial
from typing import Annotated

import anyio
from fastapi import APIRouter, Response, UploadFile
from fastapi import Form as FormBody

from app.answers import BatchAnswer, CompareAnswer, SearchAnswer, compare_answer, search_answer
from app.forms import NO_REPEATS, ONE_IMAGE, BatchForm, CompareForm, GalleryName, SearchForm
from app.problems import Problem, of_error
from app.routes.wiring import ServiceDep, failures
from app.service import Service
from roadmatch.embedding import Encoded
from roadmatch.errors import ImageError
from roadmatch.gallery import galleries
from roadmatch.gallery.search import Query, compare

router = APIRouter(tags=["Search"])
_MULTIPART = FormBody(media_type="multipart/form-data")


@router.post(
    "/v1/galleries/{gallery}/search",
    response_model=SearchAnswer,
    responses=failures(404, 413, 415, 422, 503),
    dependencies=[ONE_IMAGE],
)
async def search_gallery(
    gallery: GalleryName, form: Annotated[SearchForm, _MULTIPART], service: ServiceDep
) -> Response:
    """Is this picture in the gallery, and where? `match` if the best item's score reaches the threshold."""

    def answer() -> bytes:
        found, query = service.encode_for(gallery, form.image.file.read())  # in memory only once its turn has come
        point, answers = service.search(
            found, [query], rule=form.rule, threshold=form.threshold, top_k=form.top_k, fresh=True
        )
        return search_answer(service, found, point, answers[0]).model_dump_json().encode()

    return Response(await service.on_a_core(answer), media_type="application/json")


@router.post(
    "/v1/galleries/{gallery}/search-batch",
    response_model=BatchAnswer,
    responses=failures(404, 413, 422, 503),
    dependencies=[NO_REPEATS],
)
async def search_batch(gallery: GalleryName, form: Annotated[BatchForm, _MULTIPART], service: ServiceDep) -> Response:
    """Up to 64 searches on one generation of the gallery; a bad picture gets its problem, the others their answers."""
    found = await service.on_a_core(partial(galleries.get, service.database, gallery))
    service.encoder(found.bundle)
    queries = await _encode_all(service, found.bundle, form.image)

    def answer() -> bytes:
        good = [query for query in queries if isinstance(query, Encoded)]
        point, answers = service.search(found, good, rule=form.rule, threshold=form.threshold, top_k=form.top_k)
        left = iter(answers)
        return (
            BatchAnswer(
                answers=[
                    search_answer(service, found, point, next(left)) if isinstance(query, Encoded) else query
                    for query in queries
                ]
            )
            .model_dump_json()
            .encode()
        )

    return Response(await service.on_a_core(answer), media_type="application/json")


@router.post(
    "/v1/compare",
    response_model=CompareAnswer,
    responses=failures(404, 413, 415, 422, 503),
    dependencies=[NO_REPEATS],
)
async def compare_pictures(form: Annotated[CompareForm, _MULTIPART], service: ServiceDep) -> Response:
    """Do two pictures show the same thing? The numbers are those of a search for `query` where `picture` is stored."""

    def answer() -> bytes:
        gallery = None if form.gallery is None else galleries.get(service.database, form.gallery)
        bundle = gallery.bundle if gallery else form.bundle or service.default_bundle
        points = service.points(bundle)
        generation = service.generation(gallery) if gallery else None
        size = (generation.items, generation.images) if generation else (1, 1)
        rule = form.rule or (gallery.rule if gallery else points.default_rule)
        point = points.point(rule) if form.threshold is None else None
        threshold = point.threshold(size[1]).value if point else form.threshold
        assert threshold is not None
        query, picture = (service.encode_here(bundle, upload.file.read()) for upload in (form.query, form.picture))
        score = service.encoder(bundle).bundle.manifest.score
        found = compare(Query(query.vector, query.b), Query(picture.vector, picture.b), score, threshold=threshold)
        return (
            compare_answer(service, bundle, gallery, size, point, round(threshold, 6), found).model_dump_json().encode()
        )

    return Response(await service.on_a_core(answer), media_type="application/json")


async def _encode_all(service: Service, bundle: str, pictures: list[UploadFile]) -> list[Encoded | Problem]:
    """Each picture's embedding, or what is wrong with it."""
    results: list[Encoded | Problem | None] = [None] * len(pictures)

    async def one(number: int, upload: UploadFile) -> None:
        try:
            results[number] = await service.on_a_core(lambda: service.encode_here(bundle, upload.file.read()))
        except ImageError as error:
            results[number] = of_error(error)

    async with anyio.create_task_group() as tasks:
        for number, upload in enumerate(pictures):
            tasks.start_soon(one, number, upload)
    return [result for result in results if result is not None]
