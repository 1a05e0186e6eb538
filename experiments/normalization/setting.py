"""One training run as data: everything that determines its result except the seed."""

from __future__ import annotations

from dataclasses import dataclass

from clipwise.layers.public_batchnorm import PUBLIC_KINDS
from experiments.harness.setting import Keyed

SIDES = {"lenet_300_100": 28, "lenet5": 28, "tutorial_cnn": 24}  # of images; 32 for all others
TEXT_MODELS = ("bilstm",)


@dataclass(frozen=True)
class Setting(Keyed):
    """A training run.

    Attributes:
        data, model: names.
        norm: "none", "layer", "group", "batch", a kind of public statistics, or "released": noised running statistics
            that earlier steps released.
        placement: the layers with a norm, see `experiments.models.PLACEMENTS`.
        width: of the first stage of a deep network; None for the usual one.
        noise: standard deviation of the noise on every weight, drawn at each pass. It gives no privacy.
        epsilon: the privacy budget; None trains without privacy.
        clip: "example" clips the gradient of each example, "batch" the mean gradient of each microbatch. The latter
            allows statistics of the microbatch.
        statistics: for evaluation with clip="batch": of "public" rows, or "noised" ones of the run.
        pretrained: freeze convolutions that were trained on public labelled images.
        trains_words: whether word vectors are trained.
        batch_size: the (expected) batch size.
        epochs, learning_rate: private runs use SGD with momentum, others Adam.
    """

    NAMED = ("data", "model", "norm", "placement")

    data: str = "mnist"
    model: str = "lenet5"
    norm: str = "none"
    placement: str = "every"
    width: int | None = None
    noise: float = 0.0
    epsilon: float | None = None
    clip: str = "example"
    statistics: str = "public"
    pretrained: bool = False
    trains_words: bool = True
    batch_size: int = 512
    epochs: int = 15
    learning_rate: float = 1e-3

    @property
    def is_private(self) -> bool:
        """Whether the run clips and adds noise."""
        return self.epsilon is not None

    @property
    def needs_public_rows(self) -> bool:
        """Whether statistics come from public rows, in training or for evaluation."""
        return self.has_public_norm or (self.clips_microbatches and self.statistics == "public")

    @property
    def releases_statistics(self) -> bool:
        """Whether noised running statistics are part of each release."""
        return self.norm == "released" or self.statistics == "noised"

    @property
    def has_public_norm(self) -> bool:
        """Whether the norm uses statistics of public rows, also in training."""
        return self.norm in PUBLIC_KINDS

    @property
    def clips_microbatches(self) -> bool:
        """Whether microbatches are clipped instead of examples."""
        return self.clip == "batch"

    @property
    def built_norm(self) -> str:
        """The norm that the model is built with. Public statistics replace batch norm later."""
        return "batch" if self.has_public_norm or self.norm == "released" else self.norm

    @property
    def side(self) -> int:
        """Height and width of the images; 0 for texts."""
        return 0 if self.model in TEXT_MODELS else SIDES.get(self.model, 32)
