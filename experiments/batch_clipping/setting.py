"""One training run as data: everything that determines its result except the seed."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.harness.setting import Keyed

# How the gradient is split into parts, and whether that needs public data.
PARTS = {
    "all": False,  # full-gradient clipping
    "layerwise": False,  # equal bounds
    "enhanced": True,  # adaptive, C_h = C e_h / max e
    "zhang": True,  # adaptive, C_h = e_h
    "groups": True,  # four groups of layers by norm
    "multipliers": True,  # the least noise
    "multipliers-paper": True,
    "random-layer": False,
}
GROUPS = 4


@dataclass(frozen=True)
class Setting(Keyed):
    """A training run.

    Attributes:
        data, model, norm: names of `experiments.data` and `experiments.models`.
        clip: "none" trains without privacy; "example" clips each example, "batch" the mean of a microbatch.
        parts: one of `PARTS`.
        layers: the unit that counts as a layer: "layer" (a module) or "tensor".
        max_norm: C; for adaptive parts, the master constant.
        norm_decay: the factor of C after each epoch.
        sigma: the paper's sigma: the noise on part h has standard deviation 2 C_h sigma, so the joint multiplier is
            sigma / sqrt(number of parts). Used unless there is an epsilon.
        epsilon: the budget that noise is calibrated to.
        split: how noise is divided over parts.
        sampling: how batches are drawn.
        learning_rate, decay: the rate, and its factor after each epoch. Used unless there is a noise_rate.
        noise_rate: the standard deviation of an update's noise on a coordinate, which sets the rate.
        augmented: whether images are cropped at random and, if `flipped`, flipped; views: the number of views averaged.
        sparse_from: number of epochs after which entries with small released gradients are frozen, after each epoch.
        local_rate: the rate of local SGD steps with momentum 0.9 in each microbatch, of which the change is clipped.
        watches_norms: record the norms of layers after each epoch.
    """

    NAMED = ("data", "model", "norm", "clip", "parts")

    data: str = "cifar10"
    model: str = "resnet18"
    norm: str = "batch"
    clip: str = "batch"
    parts: str = "enhanced"
    layers: str = "tensor"
    max_norm: float = 0.095
    norm_decay: float = 1.0
    sigma: float | None = 0.01875
    epsilon: float | None = None
    split: str = "equal"
    sampling: str = "fixed-size"
    batch_size: int = 64
    microbatches: int = 1
    epochs: int = 50
    momentum: float = 0.0
    learning_rate: float = 0.025
    decay: float = 0.9
    noise_rate: float | None = None
    augmented: bool = True
    flipped: bool = True
    views: int = 1
    sparse_from: int | None = None
    local_rate: float | None = None
    watches_norms: bool = False

    @property
    def is_private(self) -> bool:
        """Whether the run clips and adds noise."""
        return self.clip != "none"

    @property
    def divisor(self) -> float:
        """The expected number of clipped vectors in a sum."""
        return self.batch_size if self.clip == "example" else self.microbatches
