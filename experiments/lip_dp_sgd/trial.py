"""One run of a search or of a table: everything that is chosen before it starts."""

from __future__ import annotations

from dataclasses import dataclass

from clipwise.errors import ConfigurationError
from clipwise.validation.arguments import one_of
from experiments.harness.setting import Keyed

METHODS = ("dp-sgd", "lip", "fix-lip", "plain")
FIRST_WEIGHTS = ("usual", "orthogonal")
TITLES = {"dp-sgd": "DP-SGD", "lip": "Lip-DP-SGD", "fix-lip": "Fix-Lip-DP-SGD", "plain": "without privacy"}


def require_bounded(method: str, norm: str) -> None:
    """Raise if a method needs a norm with a bound and this one has none."""
    if method in ("lip", "fix-lip") and norm == "group":
        raise ConfigurationError(
            f"norm='group' has no bounded slope, which method={method!r} needs: use norm='bounded', a group norm with "
            "a lower limit on the deviation, or 'none'."
        )


@dataclass(frozen=True)
class Trial(Keyed):
    """A training setting.

    Attributes:
        data: the name of a table or a set of images.
        method: "dp-sgd" clips each example's gradient to `max_norm`; "lip" clips each layer's weights to it and derives
            the noise from the weights; "fix-lip" derives it from `max_norm` alone; "plain" has no privacy.
        norm: "none", or "bounded" for group norm with the lower limit `alpha` on the deviation.
        epsilon, noise_multiplier: the budget or the noise. One of the two, except for "plain".
        batch_size, sample_rate: the expected size of a Poisson batch, or the sampling rate.
        max_norm: C, of gradients or of weights.
        split: how the noise is divided over layers, for "lip" and "fix-lip".
        first_weights: "usual", torch's default, or "orthogonal": all singular values of a layer are 1, and its biases
            0. Activations and gradients are then close to their bounds.
        network: the name of a model, instead of that of the data set.
        averaged: the decay of an exponential average of the parameters, which is then tested too.
    """

    NAMED = ("data", "method", "norm")
    DIGITS = 6

    data: str
    method: str = "dp-sgd"
    norm: str = "none"
    epsilon: float | None = None
    noise_multiplier: float | None = None
    batch_size: int | None = None
    sample_rate: float | None = None
    epochs: int = 10
    learning_rate: float = 1e-2
    max_norm: float = 1.0
    alpha: float = 0.5
    groups: int = 8
    temperature: float = 1.0
    split: str = "optimal"
    averaged: float | None = None
    first_weights: str = "usual"
    network: str | None = None

    def __post_init__(self) -> None:
        one_of("method", self.method, METHODS)
        one_of("first_weights", self.first_weights, FIRST_WEIGHTS)
        if self.method != "plain" and (self.epsilon is None) == (self.noise_multiplier is None):
            raise ConfigurationError("Give epsilon or noise_multiplier, and not both.")
        if (self.batch_size is None) == (self.sample_rate is None):
            raise ConfigurationError("Give batch_size or sample_rate, and not both.")

    @property
    def is_lipschitz(self) -> bool:
        """Whether weights are clipped instead of gradients."""
        return self.method in ("lip", "fix-lip")
