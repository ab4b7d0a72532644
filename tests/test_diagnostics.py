"""What is looked at while a network trains, against the definitions in loops."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from training import recipe
from training.fitting.diagnostics import Looks, diagnose


def batch(seed: int = 0, images: int = 14, classes: int = 4) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (images,), generator=made)
    return normalize(torch.randn(images, 5, generator=made)), labels


def test_unsaturated_comparisons_and_violations_are_those_of_the_definition() -> None:
    embeddings, labels = batch()
    looks = Looks(temperature=0.03, positive=0.4, negative=0.1)
    s = (embeddings @ embeddings.T).tolist()
    pairs = [(i, j) for i in range(len(s)) for j in range(len(s)) if i != j]
    positives = [(i, j) for i, j in pairs if labels[i] == labels[j]]
    negatives = [pair for pair in pairs if pair not in positives]

    def near(one: tuple[int, int], other: tuple[int, int]) -> bool:
        return one != other and abs(s[one[0]][one[1]] - s[other[0]][other[1]]) < 4 * looks.temperature

    in_all = [sum(near(pair, other) for other in pairs) for pair in positives]
    in_own = [sum(near(pair, other) for other in pairs if other[0] == pair[0]) for pair in positives]
    found = diagnose(embeddings, labels, looks)
    assert found.unsaturated_in_all_pairs == pytest.approx(sum(in_all) / len(positives))
    assert found.unsaturated_in_own_list == pytest.approx(sum(in_own) / len(positives))
    assert found.violating_positives == pytest.approx(sum(s[i][j] < 0.4 for i, j in positives) / len(positives))
    assert found.violating_negatives == pytest.approx(sum(s[i][j] > 0.1 for i, j in negatives) / len(negatives))
    assert sum(found.positives) == len(positives)
    assert sum(found.negatives) == len(negatives)
    assert found.images == 14


def test_histograms_have_their_pairs_in_the_bin_of_their_similarity() -> None:
    angles = torch.tensor([0.0, math.pi / 3, math.pi])  # similarities .5, -1, -.5
    found = diagnose(torch.stack([angles.cos(), angles.sin()], dim=1), torch.tensor([0, 0, 1]), Looks())
    assert {place: count for place, count in enumerate(found.positives) if count} == {30: 2}
    assert {place: count for place, count in enumerate(found.negatives) if count} in ({0: 2, 10: 2}, {0: 2, 9: 2})


def test_the_gap_is_how_much_better_the_lists_of_halves_are() -> None:
    """Worked by hand: images 0, 1 and 4 are of one class; the halves of a query's list are every other image."""
    angles = torch.tensor([0.0, 0.1, 0.25, 0.45, 0.7])
    labels = torch.tensor([0, 0, 1, 2, 0])
    # Query 0 sees 1+ 2 3 4+: AP 3/4; in halves 1+ 3 and 2 4+: 1 and 1/2. Query 1 sees 0+ 2 3 4+, the same.
    # Query 4 sees 3 2 1+ 0+: AP 5/12; in halves 2 0+ and 3 1+: 1/2 and 1/2.
    found = diagnose(torch.stack([angles.cos(), angles.sin()], dim=1), labels, Looks())
    assert found.decomposability_gap == pytest.approx((0 + 0 + 1 / 12) / 3)


def test_a_batch_without_pairs_has_no_figures() -> None:
    found = diagnose(torch.eye(3), torch.arange(3), Looks())
    assert found.unsaturated_in_all_pairs is None
    assert found.decomposability_gap is None
    assert found.violating_positives is None
    assert found.violating_negatives == 0


def test_temperature_and_margins_are_those_of_the_losses_where_they_have_some() -> None:
    assert Looks.of(recipe.Gsap(temperature=0.002)) == Looks(0.002, 0.9, 0.6)
    beside = (recipe.Beside(loss=recipe.Tcm()),)
    assert Looks.of(recipe.SmoothAp(temperature=0.02), beside) == Looks(0.02, 0.9, 0.5)
    assert Looks.of(recipe.KoLeo()) == Looks()
