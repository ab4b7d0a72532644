"""Generations made of a few lines, without a database."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from roadmatch.gallery.replica import Generation
from roadmatch.scoring import ScoreRule, Vector, fold
from roadmatch.vectors.faiss import sketch

RULE = ScoreRule(beta=0.5, gamma=0.3, k=5)


@dataclass(frozen=True)
class Image:
    item: str
    id: str
    vector: Vector
    b: float = 0.0
    alive: bool = True


def generation_of(images: Sequence[Image], sketched: Sequence[int] = ()) -> Generation:
    """A generation with these rows; sketched: lengths of the sketches, the rest being the tail."""
    item_ids = list(dict.fromkeys(image.item for image in images))
    living = [image for image in images if image.alive]
    b = np.array([image.b for image in images])
    vectors = fold(np.stack([image.vector for image in images]), b) if images else np.empty((0, 0), np.float32)
    starts = np.cumsum([0, *sketched])
    assert starts[-1] <= len(images)
    return Generation(
        seq=9,
        dimension=len(images[0].vector) if images else 0,
        vectors=vectors,
        sketches=tuple(
            sketch(vectors[start : start + n], int(start)) for start, n in zip(starts, sketched, strict=False)
        ),
        b=b,
        image_ids=[image.id for image in images],
        item_numbers=np.array([item_ids.index(image.item) for image in images], np.int64),
        item_ids=item_ids,
        alive=np.array([image.alive for image in images], np.bool_),
        items=len({image.item for image in living}),
        images=len(living),
    )


def unit(rng: np.random.Generator, *shape: int) -> Vector:
    vectors = rng.normal(size=shape)
    unit_vectors: Vector = (vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)).astype(np.float32)
    return unit_vectors
