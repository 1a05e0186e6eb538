"""One training run as data: everything that decides its result but the seed."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.harness.setting import Keyed

# How the gradient is cut into parts, and whether that needs public data.
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
        data, model, norm: by the names of `experiments.data` and `experiments.models`.
        clip: "none" is training without privacy; "example" clips each example, "batch" the mean of a mini-set.
        parts: one of `PARTS`.
        layers: what a layer is: "layer" (a module) or "tensor".
        max_norm: C; where parts adapt, the master constant.
        norm_decay: C is multiplied by this after each epoch.
        sigma: the paper's: on part h the noise has standard deviation 2 C_h sigma, so that the joint multiplier is
            sigma / sqrt(number of parts); or
        epsilon: noise is calibrated to this budget.
        split: how noise is divided over parts.
        sampling: how batches are drawn.
        batch_size, mini_sets, epochs, momentum: as they say.
        learning_rate, decay: the rate, and by what it is multiplied after each epoch; or
        noise_rate: the rate is such that an update's noise has this standard deviation on a coordinate.
        augmented: whether images are cropped at random and, if `flipped`, flipped; views: how many views are averaged.
        sparse_from: entries that go nowhere are frozen at the end of each epoch that begins after so many.
        local_rate: mini-sets make local SGD steps with momentum 0.9 at this rate, and the change is clipped.
        watches_norms: note the norms of layers after each epoch.
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
    mini_sets: int = 1
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
        """Whether anything is clipped and noised."""
        return self.clip != "none"

    @property
    def divisor(self) -> float:
        """How many clipped vectors a sum is expected to have."""
        return self.batch_size if self.clip == "example" else self.mini_sets
