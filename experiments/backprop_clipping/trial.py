"""One run: a method, a data set and everything that is chosen before it starts."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.harness.setting import Keyed


@dataclass(frozen=True)
class Method:
    """A training method.

    Attributes:
        title: its name on a page.
        clips: "nothing"; "examples", each example's gradient; or "layers", backpropagation clipping.
        activation, norm: of the network.
        mode, bound: of clipped layers, see `clipwise.layers.clip_inputs`.
        parts: the parts of per-example gradients.
        is_private: whether there is noise.
    """

    title: str
    clips: str
    activation: str = "relu"
    norm: str = "none"
    mode: str = "clip"
    bound: str = "gradient"
    parts: str = "all"
    is_private: bool = True


METHODS: dict[str, Method] = {
    "plain": Method("without privacy", "nothing", is_private=False),
    "clipped": Method("clipped, without noise", "layers", is_private=False),
    "clipped-upstream": Method(
        "clipped by the paper's bound, without noise", "layers", bound="upstream", is_private=False
    ),
    "dp-sgd-relu": Method("DP-SGD, ReLU", "examples"),
    "dp-sgd-tanh": Method("DP-SGD, tanh", "examples", activation="tanh"),
    "upstream-clip": Method("backprop, the paper's bound, clip", "layers", bound="upstream"),
    "upstream-normalize": Method(
        "backprop, the paper's bound, normalize", "layers", mode="normalize", bound="upstream"
    ),
    "gradient-clip": Method("backprop, smaller bound, clip", "layers"),
    "gradient-clip-tanh": Method("backprop, smaller bound, clip, tanh", "layers", activation="tanh"),
    "gradient-clip-norm": Method("backprop, smaller bound, clip, group norm", "layers", norm="group"),
    "gradient-normalize": Method("backprop, smaller bound, normalize", "layers", mode="normalize"),
    "dp-sgd-layer": Method("DP-SGD per layer, ReLU", "examples", parts="layer"),
    "dp-sgd-norm": Method("DP-SGD, ReLU, group norm", "examples", norm="group"),
}
OPEN = ("plain", "clipped", "clipped-upstream")
DP_SGD = ("dp-sgd-tanh", "dp-sgd-relu", "dp-sgd-layer", "dp-sgd-norm")
BACKPROP = (
    "upstream-clip",
    "upstream-normalize",
    "gradient-clip",
    "gradient-clip-tanh",
    "gradient-clip-norm",
    "gradient-normalize",
)


@dataclass(frozen=True)
class Trial(Keyed):
    """A training setting.

    Attributes:
        data: the name of a set of images.
        method: one of `METHODS`.
        epsilon: the budget, by PLD under Poisson sampling and zero-out adjacency; None without noise.
        sample_rate: the probability that a record is in a batch.
        optimizer: "adam"; or "sgd" with momentum 0.9.
        learning_rate: for SGD relative to the bound on one example's gradient, so that it does not depend on C.
        max_norm: C, of gradients of examples.
        input_norm, grad_norm: C1 and C2, of clipped layers.
    """

    NAMED = ("data", "method")
    DIGITS = 6

    data: str
    method: str
    epsilon: float | None = None
    sample_rate: float = 1 / 32
    epochs: int = 15
    optimizer: str = "adam"
    learning_rate: float = 1e-3
    max_norm: float = 1.0
    input_norm: float = 1.0
    grad_norm: float = 1.0

    @property
    def way(self) -> Method:
        """The method."""
        return METHODS[self.method]
