"""Bundles, health and metrics."""

import anyio
import anyio.to_thread
from fastapi import APIRouter, Response
from pydantic import BaseModel

from app.routes.wiring import ServiceDep, failures
from roadmatch.errors import StoreUnavailable
from roadmatch.jobs import queue
from roadmatch.operating_points import Evidence

router = APIRouter(tags=["Operations"])


class PointView(BaseModel):
    """An operating point without its table of thresholds; an unsupported one names the least rate that can be shown."""

    rule: str
    supported: bool
    least_rate: float | None
    shown_up_to: int
    evidence: Evidence | None
    shifted: Evidence | None


class BundleView(BaseModel):
    """A loaded model bundle."""

    id: str
    architecture: str
    dimension: int
    licence: str
    background_pictures: int
    default_rule: str
    operating_points: list[PointView]


class BundleList(BaseModel):
    """The loaded bundles, the default first."""

    bundles: list[BundleView]


class Health(BaseModel):
    """`ok`, and nothing else."""

    status: str = "ok"


@router.get("/v1/bundles", response_model=BundleList)
def list_bundles(service: ServiceDep) -> BundleList:
    """What the service embeds with, and what its rules reach."""
    return BundleList(
        bundles=[
            BundleView(
                id=encoder.bundle.id,
                architecture=encoder.bundle.manifest.architecture,
                dimension=encoder.bundle.manifest.dimension,
                licence=encoder.bundle.manifest.licence,
                background_pictures=len(encoder.bundle.background),
                default_rule=service.points(name).default_rule,
                operating_points=[
                    PointView.model_validate(point, from_attributes=True) for point in service.points(name).points
                ],
            )
            for name, encoder in service.encoders.items()
        ]
    )


@router.get("/livez", response_model=Health)
async def live() -> Health:
    """The process answers; nothing else is touched."""
    return Health()


@router.get("/readyz", response_model=Health, responses=failures(503))
async def ready(service: ServiceDep) -> Health:
    """The bundles are loaded, the database answers, and the service is not stopping."""
    if service.stopping:
        raise StoreUnavailable("the service is stopping")
    await anyio.to_thread.run_sync(service.database.ping, limiter=service.health)
    return Health()


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(service: ServiceDep) -> Response:
    """For Prometheus; what is counted in the database is left out while that does not answer."""
    try:
        load = await anyio.to_thread.run_sync(queue.load, service.database, limiter=service.health)
    except StoreUnavailable:
        load = None
    return Response(service.metrics.text(load), media_type="text/plain; version=0.0.4; charset=utf-8")
