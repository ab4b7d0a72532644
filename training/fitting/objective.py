"""What is minimised: the recipe's losses as one module, in one process or in several."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from roadmatch.losses import adapted, ready
from roadmatch.losses.adapted import Adapted, triplet_indices
from roadmatch.losses.approximations import Sigmoid, UpperBound
from roadmatch.losses.distributed import DistributedGlobalAP, DistributedMeans, InEachProcess, Mean
from roadmatch.losses.info_nce import InfoNCE
from roadmatch.losses.koleo import KoLeo
from roadmatch.losses.margins import Margins, Reduction
from roadmatch.losses.pair_loss import PairLoss, Term
from roadmatch.losses.pairs import Pairs
from roadmatch.losses.precision import full_precision
from roadmatch.losses.rank_ap import RankAP, Scope
from roadmatch.losses.recall import RecallAtK
from training import recipe

Count = Callable[[Pairs], Tensor]


def objective_of(loss: recipe.Loss, beside: Sequence[recipe.Beside] = (), *, distributed: bool) -> nn.Module:
    """loss + the sum of weight * other -> embeddings (B, D) unit length, labels (B,) of this process -> () loss.

    distributed: the loss is that of the whole batch of all processes, the same in each, and gradients of parameters
    are right once they are averaged, as DistributedDataParallel does. gSAP and the means over queries or pairs compare
    a process's own rows with everybody's. gSAP with `drop` needs the whole batch's lowest negatives, so that every
    process computes all of it.
    """
    parts = [(1.0, loss), *((other.weight, other.loss) for other in beside)]
    if not distributed:
        return _sum_of([(weight, _alone(part)) for weight, part in parts])
    means: list[Mean] = []
    modules: list[tuple[float, nn.Module]] = []
    for weight, part in parts:
        if not isinstance(part, recipe.Gsap):
            means += [Mean(mean.term, mean.count, weight * mean.weight) for mean in _means(part)]
        elif part.drop:
            modules.append((weight, InEachProcess(_alone(part))))
        else:
            modules.append((weight, DistributedGlobalAP(part.temperature)))
    return _sum_of([*modules, (1.0, DistributedMeans(means))] if means else modules)


class WeightedSum(nn.Module):
    """The weighted sum of losses, each called with embeddings and labels."""

    def __init__(self, parts: Sequence[tuple[float, nn.Module]]) -> None:
        super().__init__()
        self.weights = tuple(weight for weight, _ in parts)
        self.losses = nn.ModuleList(loss for _, loss in parts)

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """embeddings (B, D), labels (B,) -> () loss."""
        return torch.stack(
            [weight * loss(embeddings, labels) for weight, loss in zip(self.weights, self.losses, strict=True)]
        ).sum()


def _sum_of(parts: Sequence[tuple[float, nn.Module]]) -> nn.Module:
    return parts[0][1] if len(parts) == 1 and parts[0][0] == 1 else WeightedSum(parts)


def _alone(loss: recipe.Loss) -> nn.Module:
    """The loss of a batch that lies in one process."""
    match loss:
        case recipe.Gsap():
            return ready.gsap(loss.temperature, loss.drop)
        case recipe.SmoothAp():
            return ready.smooth_ap(loss.temperature)
        case recipe.SupAp():
            return ready.sup_ap(loss.temperature, loss.slope)
        case recipe.Roadmap():
            margins = Margins(loss.positive, loss.negative, _reduction(loss))
            return PairLoss(RankAP(Scope.PER_QUERY, UpperBound()), margins, weights=(1 - loss.weight, loss.weight))
        case recipe.RecallAtK():
            return ready.recall_at_k(loss.ks)
        case recipe.Calibration():
            return ready.calibration(loss.positive, loss.negative)
        case recipe.Tcm():
            return ready.tcm(loss.positive, loss.negative)
        case recipe.Contrastive():
            return adapted.contrastive(loss.positive, loss.negative)
        case recipe.InfoNce():
            return ready.info_nce(loss.temperature)
        case recipe.Triplet():
            return adapted.triplet(loss.margin)
        case recipe.KoLeo():
            return ready.koleo(negatives_only=loss.negatives_only)


def _means(loss: recipe.Loss) -> list[Mean]:
    """The same losses as weighted means and what each is a mean over."""
    match loss:
        case recipe.SmoothAp():
            return [Mean(RankAP(Scope.PER_QUERY, Sigmoid(loss.temperature)), _with_positives)]
        case recipe.SupAp():
            return [Mean(RankAP(Scope.PER_QUERY, UpperBound(loss.temperature, loss.slope)), _with_positives)]
        case recipe.Roadmap():
            ranking = Mean(RankAP(Scope.PER_QUERY, UpperBound()), _with_positives, 1 - loss.weight)
            return [ranking, *_sides(loss.positive, loss.negative, _reduction(loss), loss.weight)]
        case recipe.RecallAtK():
            return [Mean(RecallAtK(loss.ks), _with_positives)]
        case recipe.Calibration():
            return _sides(loss.positive, loss.negative, Reduction.PER_QUERY)
        case recipe.Tcm() | recipe.Contrastive():  # the same loss, with other margins
            return _sides(loss.positive, loss.negative, Reduction.VIOLATING)
        case recipe.InfoNce():
            return [Mean(InfoNCE(loss.temperature), _positives)]
        case recipe.Triplet():
            return [Mean(_of_pairs(adapted.triplet(loss.margin)), _triplets_above(loss.margin))]
        case recipe.KoLeo():
            counted = _with_negatives if loss.negatives_only else _with_neighbours
            return [Mean(KoLeo(loss.negatives_only), counted)]
        case recipe.Gsap():
            raise ValueError("gSAP is one list of all pairs, and no mean")


def _reduction(loss: recipe.Roadmap) -> Reduction:
    return Reduction.VIOLATING if loss.violating else Reduction.PER_QUERY


def _sides(positive: float, negative: float, reduction: Reduction, weight: float = 1.0) -> list[Mean]:
    """A loss with margins as two means: positives and negatives are counted apart."""
    pulled = Margins(positive, negative, reduction, negative_weight=0)
    pushed = Margins(positive, negative, reduction, positive_weight=0)
    if reduction is Reduction.PER_QUERY:
        return [Mean(pulled, _with_positives, weight), Mean(pushed, _with_negatives, weight)]
    return [Mean(pulled, _positives_below(positive), weight), Mean(pushed, _negatives_above(negative), weight)]


def _of_pairs(loss: Adapted) -> Term:
    def term(pairs: Pairs) -> Tensor:
        assert loss.indices is not None
        assert pairs.queries is not None
        with full_precision(pairs.queries.device):
            value: Tensor = loss.loss(pairs.queries, None, loss.indices(pairs), pairs.candidates)
        return value + pairs.nothing()

    return term


def _positives(pairs: Pairs) -> Tensor:
    return pairs.positives_per_query.sum()


def _with_positives(pairs: Pairs) -> Tensor:
    return (pairs.positives_per_query > 0).sum()


def _with_negatives(pairs: Pairs) -> Tensor:
    return (pairs.negatives_per_query > 0).sum()


def _with_neighbours(pairs: Pairs) -> Tensor:
    return (pairs.positives_per_query + pairs.negatives_per_query > 0).sum()


def _positives_below(margin: float) -> Count:
    return lambda pairs: (pairs.similarity.detach().flatten()[pairs.positives] < margin).sum()


def _negatives_above(margin: float) -> Count:
    def count(pairs: Pairs) -> Tensor:
        above = pairs.similarity.detach().flatten() > margin
        return above.sum() - above[pairs.positives].sum() - above[pairs.left_out].sum()

    return count


def _triplets_above(margin: float) -> Count:
    def count(pairs: Pairs) -> Tensor:
        query, positive, negative = triplet_indices(pairs)
        similarity = pairs.similarity.detach()
        return (similarity[query, negative] - similarity[query, positive] + margin > 0).sum()

    return count
