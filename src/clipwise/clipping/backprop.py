"""Backpropagation clipping: clip the input and the upstream gradient of each layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from clipwise.clipping.base import Bound, Clipper, Parameters, Site, Split, Strategy, require_entries, require_split
from clipwise.clipping.clipped_graph import Wiring, clipped_nodes, require_rows_of_examples
from clipwise.errors import ConfigurationError, StepError, UnreachedParametersError, UnsupportedModelError
from clipwise.gradients.precision import PutAside, chosen_arithmetic
from clipwise.layers.clipped import ClippedLayer
from clipwise.layers.clipped.layer import MODES, ClipConstants, clip_constant
from clipwise.layers.clipped.switch import noting, settled
from clipwise.validation.arguments import one_of, with_plain_numbers

_PROBED_BATCHES = 2
_PROBED_AGAIN = 256  # steps


@dataclass(frozen=True)
class Backprop(Strategy):
    """Backpropagation clipping: bounded gradients from one ordinary backward pass, without per-example gradients.

    The trainable layers must be clipped layers, made by `clipwise.layers.clip_inputs`. Each one scales the input of
    every example to a norm of at most C1 and, in the backward pass, its upstream gradient to a norm of at most C2. The
    gradient of a layer is a product of the two. So one example adds at most C1 C2 to the gradient of the weights. It
    adds at most C2 to that of the bias, which is a separate part. The layers hold the constants; the values given here
    must agree with them. `clipwise.layers.set_clips` changes them between two steps, and the noise is scaled
    accordingly.

    Args:
        input_norm, grad_norm, mode: C1, C2 and "clip" or "normalize" of all layers; None for those that they have.
        split: how the noise is divided over the parts: "optimal", "equal", or a weight for each part. Every trainable
            parameter is a part.

    Guarantee:
        - Adjacency: zero-out (sensitivity C1 C2 for weights, C2 for bias, scale, shift and embedding, times the allowed
          uses of the layer) and replace-one (twice as much), under every sampling scheme that supports the adjacency,
          except "partition". All parts use the same batch and are one Gaussian mechanism.
        - Unit: one record.
        - Assumptions: each loss depends on its own example only, and row i of a layer belongs to example i. Probes
          check both; they are not a proof. Constants that change during training depend only on public or released
          values.
        - The graph of every batch is checked: each trainable parameter must be used only in its clipped layer, and no
          more often than allowed. Trainable weights are float32 or float64, since sums are formed in their dtype.
          Losses are summed, not averaged, and the divisor is a constant.
        - An input or an upstream gradient that is not finite is replaced by 0; so are inputs longer than 2^50 C1 and
          gradients longer than 2^76 times their bound. Padding rows of a compiled step have weight 0, assuming that
          backward passes map 0 to 0.
        - Norms are clipped to (1 - 2^-10) times the bound, which covers the rounding of one example's terms. In TF32
          the stated sensitivity is larger by 2^-6. This assumes convolutions that are sums of products, as in implicit
          GEMM; Winograd and FFT convolutions round at the scale of the whole input.
        - Adding up B examples in float32 changes the sum by a few times B 2^-24 of the sensitivity. For biases, scales
          and shifts it is a few times B 2^-18, because their terms may cancel to 2^-6 of their size before they are
          scaled up. No noise is added for this.
        - Rounding in the passes of one example may depend on the other examples, since torch chooses kernels by size.
          This is assumed to stay small. A network that amplifies it, such as a chaotic recurrent one, lets one record
          change all gradients of a batch.
        - Mode "normalize" scales gradients up by at most C2 2^14. In float32, with losses of ordinary size, a gradient
          that consists only of rounding errors stays below 2^-10 of the bound. Rounding errors are 2^13 times as large
          in TF32 and 2^16 times under autocast, and grow with the scale of the losses: use mode "clip" there if
          gradients may be 0. Layer and group norms over one or two numbers, which have zero gradients up to rounding,
          are refused in mode "normalize"; hand-written ones are not detected.
    """

    input_norm: float | None = None
    grad_norm: float | None = None
    mode: str | None = None
    split: Split = "optimal"

    name = "backprop"
    bounds_inside = True
    takes_views = False

    def __post_init__(self) -> None:
        with_plain_numbers(self)
        for argument in ("input_norm", "grad_norm"):
            if (given := getattr(self, argument)) is not None:
                clip_constant(argument, given)
        if self.mode is not None:
            one_of("mode", self.mode, MODES)
        require_split(self.split)

    def attach(self, site: Site) -> Clipper:
        """Bind to a model with all trainable parameters in clipped layers."""
        require_entries(site.parameters, "Backprop")
        return BackpropClipper(site, self.layers_of(site.model, site.parameters))

    def layers_of(self, model: nn.Module, parameters: Parameters) -> dict[str, ClippedLayer]:
        """The clipped layers by name. Raises if they do not cover the parameters or disagree with the arguments."""
        layers = {name: m for name, m in model.named_modules() if isinstance(m, ClippedLayer)}
        if not layers:
            raise UnsupportedModelError(
                "The model has no clipped layers, so nothing bounds its gradients: call "
                "clipwise.layers.clip_inputs(model, input_norm=..., grad_norm=...) before make_private."
            )
        for argument in ("input_norm", "grad_norm", "mode"):
            given = getattr(self, argument)
            for name, layer in layers.items():
                if given is not None and given != (has := getattr(layer.constants, argument)):
                    raise ConfigurationError(
                        f"Backprop has {argument}={given!r}, but layer {name!r} has {has!r}: pass the same value to "
                        "clip_inputs and Backprop, or omit it here."
                    )
        _require_float32(parameters)
        most_of_each(parameters, layers)
        return layers

    def require_losses(self, losses: Tensor, model: nn.Module, parameters: Parameters) -> None:
        layers = self.layers_of(model, parameters)
        nodes, _ = clipped_nodes(losses, parameters, layers.values())
        require_rows_of_examples(losses, nodes, parameters)

    def describe(self) -> dict[str, Any]:
        """The configuration in JSON types; the clipper adds the constants of the layers."""
        return {"strategy": self.name, "split": self.split if isinstance(self.split, str) else dict(self.split)}


class BackpropClipper(Clipper):
    """`Backprop` for one model."""

    is_traceable = False  # its layers measure and clip with kernels and memory of their own

    def __init__(self, site: Site, layers: Mapping[str, ClippedLayer]) -> None:
        self._parameters, self._layers = site.parameters, layers
        self.arithmetic = chosen_arithmetic(next(iter(site.parameters.values())).device)
        self.divisor = site.scheme.expected_size
        self._factor = site.factor * (1 + self.arithmetic.slack)
        self._take_constants()
        self._to_probe: dict[Wiring, int] = {}
        self._since_probe = 0

    def clipped_sum(self, losses: Tensor, real_B: Tensor | None = None) -> dict[str, Tensor]:
        """One backward pass of the summed losses. Padding rows have weight 0, so their upstream gradients are 0."""
        if len(losses) == 0:
            return self.nothing()
        # The noise was computed for the constants at the time the batch was drawn.
        for name, now in self._constants_now().items():
            if now != self._constants[name]:
                raise StepError(
                    f"The constants of layer {name!r} changed between the draw of a batch and its step. Call "
                    "layers.set_clips after a step and before the next batch is drawn."
                )
        _require_float32(self._parameters)
        nodes, wiring = clipped_nodes(losses, self._parameters, self._layers.values())
        if real_B is None:  # a captured step may not wait for the device, and follows eager ones
            self._probe(losses, nodes, wiring)
        weights_B = torch.ones_like(losses) if real_B is None else real_B.to(losses.dtype)
        with settled(), self.arithmetic.products():
            found = torch.autograd.grad(losses, list(self._parameters.values()), weights_B, allow_unused=True)
        sums = dict(zip(self._parameters, found, strict=True))
        if missing := tuple(name for name, total in sums.items() if total is None):
            raise UnreachedParametersError(missing)
        return sums

    @contextmanager
    def putting_aside(self) -> Iterator[PutAside]:
        """In this block non-finite examples are noted, not replaced by 0: see layers/clipped/switch.py."""
        aside = PutAside()
        with noting() as factors:
            yield aside
        if factors:
            aside.any(torch.cat(factors) == 0)

    def follow(self, is_updated: bool) -> bool:
        """Use constants that were set since the last step."""
        if self._constants == self._constants_now():
            return False
        self._take_constants()
        return True

    def look_again(self) -> None:
        """Make the next eager step run the probe."""
        self._since_probe = _PROBED_AGAIN

    def state_dict(self) -> dict[str, Any]:
        """The constants of the layers."""
        return {"layers": {name: [*vars(c).values(), uses] for name, (c, uses) in self._constants_now().items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore the norms of the layers, unless their modes, bounds or uses differ."""
        saved, here = state.get("layers", {}), self.state_dict()["layers"]
        if {name: values[2:] for name, values in saved.items()} != {n: v[2:] for n, v in here.items()}:
            return False
        for name, layer in self._layers.items():
            input_norm, grad_norm = saved[name][:2]
            layer.constants = replace(layer.constants, input_norm=input_norm, grad_norm=grad_norm)
        return self.follow(is_updated=False)

    def _constants_now(self) -> dict[str, tuple[ClipConstants, int]]:
        return {name: (layer.constants, layer.uses) for name, layer in self._layers.items()}

    def _take_constants(self) -> None:
        self._constants = self._constants_now()
        self.bounds = tuple(
            Bound(name, (name,), self._factor * most)
            for name, most in most_of_each(self._parameters, self._layers).items()
        )

    def _probe(self, losses: Tensor, nodes: list[Any], wiring: Wiring) -> None:
        """Probe the first batches of every graph, and one batch in every `_PROBED_AGAIN` steps."""
        self._since_probe += 1
        left = self._to_probe.setdefault(wiring, _PROBED_BATCHES)
        if len(losses) < 2 or not (left or self._since_probe >= _PROBED_AGAIN):
            return
        require_rows_of_examples(losses, nodes, self._parameters)
        self._to_probe[wiring], self._since_probe = max(0, left - 1), 0


def _require_float32(parameters: Parameters) -> None:
    """torch sums gradients in the dtype of the weights; 8 or 11 bits of precision break the bound of the sum."""
    for name, p in parameters.items():
        if torch.finfo(p.dtype).bits < 32:
            raise UnsupportedModelError(
                f"Parameter {name!r} has dtype {p.dtype}, in which sums over a batch round by more than the "
                "sensitivity: keep trainable weights in float32 (model.float()), and use torch.autocast for speed."
            )


def most_of_each(parameters: Parameters, layers: Mapping[str, ClippedLayer]) -> dict[str, float]:
    """The bound on one example's contribution to the gradient of each parameter, summed over its uses."""
    most: dict[int, float] = {}
    for where, layer in layers.items():
        bounds = layer.bounds()
        # A parameter may have several names in one layer, such as tied biases: each name is a use.
        for name, p in layer.layer.named_parameters(remove_duplicate=False):
            if name not in bounds:
                raise UnsupportedModelError(
                    f"Layer {where!r} ({type(layer.layer).__name__}) has a parameter {name!r} without a known bound: "
                    "remove parametrizations such as weight_norm, or train with PerExample(max_norm=...)."
                )
            most[id(p)] = most.get(id(p), 0.0) + layer.uses * bounds[name]
    for name, p in parameters.items():
        if id(p) not in most:
            raise UnsupportedModelError(
                f"Parameter {name!r} is trainable and in no clipped layer: call clip_inputs after all changes to the "
                "model, or freeze it with requires_grad_(False)."
            )
    return {name: most[id(p)] for name, p in parameters.items()}
