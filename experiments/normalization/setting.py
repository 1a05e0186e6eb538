"""One training run as data: everything that decides its result but the seed."""

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
        data, model: by name.
        norm: "none", "layer", "group", "batch", or in place of "batch" a kind of public statistics, or "released":
            by the noised running statistics that were released before.
        placement: behind which layers there is a norm, see `experiments.models.PLACEMENTS`.
        width: of the first stage of a deep network; None for its usual one.
        noise: standard deviation of the noise on every weight, drawn at each pass. No privacy comes of it.
        epsilon: the privacy budget; None is training without privacy.
        clip: what is clipped in private training: the gradient of each "example", or the mean gradient of each
            mini-set, "batch". The latter allows statistics of the mini-set.
        statistics: those for evaluation, where mini-sets are clipped: of "public" rows, or "noised" ones of the run.
        pretrained: convolutions come from public labelled images and stay; linear layers and norms are trained.
        trains_words: whether word vectors are trained.
        batch_size: the expected one, where it is private.
        epochs, learning_rate: as they say. Private runs use SGD with momentum, others Adam.
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
        """Whether anything is clipped and noised."""
        return self.epsilon is not None

    @property
    def needs_public_rows(self) -> bool:
        """Whether statistics come from public rows, in training or for evaluation."""
        return self.has_public_norm or (self.clips_mini_sets and self.statistics == "public")

    @property
    def releases_statistics(self) -> bool:
        """Whether noised running statistics are part of each release."""
        return self.norm == "released" or self.statistics == "noised"

    @property
    def has_public_norm(self) -> bool:
        """Whether the norm is by statistics of public rows, in training too."""
        return self.norm in PUBLIC_KINDS

    @property
    def clips_mini_sets(self) -> bool:
        """Whether mini-sets are clipped, and not examples."""
        return self.clip == "batch"

    @property
    def built_norm(self) -> str:
        """The norm that the model is built with; those with public statistics take the place of batch norm."""
        return "batch" if self.has_public_norm or self.norm == "released" else self.norm

    @property
    def side(self) -> int:
        """Height and width of the images; 0 for texts."""
        return 0 if self.model in TEXT_MODELS else SIDES.get(self.model, 32)
