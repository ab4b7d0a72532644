"""The losses of the papers under their names, ready to use."""

from roadmatch.losses.approximations import BlackBox, Sigmoid, SoftBins, UpperBound
from roadmatch.losses.info_nce import InfoNCE
from roadmatch.losses.koleo import KoLeo
from roadmatch.losses.margins import Margins, Reduction
from roadmatch.losses.pair_loss import PairLoss
from roadmatch.losses.rank_ap import RankAP, Scope
from roadmatch.losses.recall import RecallAtK
from roadmatch.losses.sigmoid_pairs import SigmoidPairs


def smooth_ap(temperature: float = 0.01, *, published: bool = False) -> PairLoss:
    """Smooth-AP (Brown et al., 2020): sigmoid ranks, mean over queries."""
    return PairLoss(RankAP(Scope.PER_QUERY, Sigmoid(temperature, published)))


def gsap(temperature: float = 0.001, drop: float = 0.0) -> PairLoss:
    """gSAP: sigmoid ranks in one list of all pairs, so that one threshold serves all queries.

    temperature: 1e-4 to 5e-2, by search. drop: the share of negatives left out, lowest first; it saves nothing here.
    """
    return PairLoss(RankAP(Scope.GLOBAL, Sigmoid(temperature), drop))


def sup_ap(
    temperature: float = 0.01, slope: float = 100.0, knee: float | None = None, *, published: bool = False
) -> PairLoss:
    """SupAP (ROADMAP: Ramzi et al., 2021): an upper bound of the exact loss, mean over queries."""
    return PairLoss(RankAP(Scope.PER_QUERY, UpperBound(temperature, slope, knee, published)))


def roadmap(weight: float = 0.5, positive: float = 0.9, negative: float = 0.6, *, published: bool = False) -> PairLoss:
    """ROADMAP (Ramzi et al., 2021, eq. 2): (1 - weight) SupAP + weight calibration with these margins.

    published: SupAP's published arithmetic, and the margins' mean over the pairs beyond them instead of over queries.
    Raises ValueError for a weight outside of [0, 1].
    """
    if not 0 <= weight <= 1:
        raise ValueError(f"weight is {weight}: a share in [0, 1] is needed")
    ranking = RankAP(Scope.PER_QUERY, UpperBound(published=published))
    margins = Margins(positive, negative, Reduction.VIOLATING if published else Reduction.PER_QUERY)
    return PairLoss(ranking, margins, weights=(1 - weight, weight))


def soft_bin_ap(bins: int = 20) -> PairLoss:
    """SoftBinAP (Revaud et al., 2019): soft histograms, mean over queries."""
    return PairLoss(RankAP(Scope.PER_QUERY, SoftBins(bins)))


def fast_ap(spaces: int = 10) -> PairLoss:
    """FastAP (Cakir et al., 2019): the same with so many spaces between bins, one bin more."""
    return soft_bin_ap(spaces + 1)


def black_box_ap(strength: float = 4.0, margin: float = 0.02) -> PairLoss:
    """BlackBox AP (Rolinek et al., 2020): exact ranks with a black box's gradient, mean over queries."""
    return PairLoss(RankAP(Scope.PER_QUERY, BlackBox(strength, margin)))


def recall_at_k(ks: tuple[int, ...] = (1, 2, 4, 8, 16), *, published: bool = False) -> PairLoss:
    """RS@k (Patel et al., 2022): smoothed recall at k."""
    return PairLoss(RecallAtK(ks, published=published))


def calibration(positive: float = 0.9, negative: float = 0.6, reduction: Reduction = Reduction.PER_QUERY) -> PairLoss:
    """ROADMAP's calibration loss alone (Ramzi et al., 2021, section 3.2)."""
    return PairLoss(Margins(positive, negative, reduction))


def tcm(positive: float = 0.9, negative: float = 0.5) -> PairLoss:
    """TCM (Zhang et al., 2024): the mean over the pairs beyond the margins. It is meant beside another loss."""
    return PairLoss(Margins(positive, negative, Reduction.VIOLATING))


def info_nce(temperature: float = 0.07) -> PairLoss:
    """InfoNCE (Oord et al., 2018), which NTXent (Chen et al., 2020) is, too: mean over positive pairs."""
    return PairLoss(InfoNCE(temperature))


def siglip(scale: float = 10.0, bias: float = -10.0) -> PairLoss:
    """SigLIP (Zhai et al., 2023): each pair by itself; scale and bias are learned, give them to the optimizer."""
    return PairLoss(SigmoidPairs(scale, bias))


def koleo(*, negatives_only: bool = False) -> PairLoss:
    """KoLeo (Sablayrolles et al., 2019), which spreads embeddings out; with negatives_only SSCD's entropy loss."""
    return PairLoss(KoLeo(negatives_only))
