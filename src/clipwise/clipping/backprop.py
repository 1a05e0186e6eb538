"""Clip what goes into each layer and what comes back to it, and let torch sum."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from clipwise.clipping.base import (
    Bound,
    Clipper,
    Parameters,
    Site,
    Split,
    Strategy,
    require_entries,
    require_records,
)
from clipwise.clipping.clipped_graph import Wiring, clipped_nodes, require_rows_of_examples
from clipwise.clipping.noise_split import require_split
from clipwise.errors import ConfigurationError, StepError, UnsupportedModelError
from clipwise.gradients.precision import chosen_arithmetic
from clipwise.gradients.rare import PutAside
from clipwise.layers.clipped import ClippedLayer
from clipwise.layers.clipped.clip_inputs import Numbers, require_layers
from clipwise.layers.clipped.scales import MODES, Constants, clip_constant
from clipwise.layers.clipped.switch import noting, settled
from clipwise.validation.arguments import one_of, with_plain_numbers

_PROBED_BATCHES = 2
_PROBED_AGAIN = 256  # steps


@dataclass(frozen=True)
class Backprop(Strategy):
    """Backpropagation clipping: bounded gradients from one ordinary backward pass, without per-example gradients.

    The model's trainable layers must be clipped ones, which `clipwise.layers.clip_inputs` puts in: each scales every
    example's input down to a norm of C1 and, on the way back, its upstream gradient to one of C2. A layer's gradient
    is a product of the two, so one example adds at most C1 C2 to the weights' gradient, and at most C2 to the bias's,
    which is a part of its own. The layers hold the constants; those given here are compared with theirs. They may be
    changed between two steps, see `clipwise.layers.set_clips`: the noise follows.

    Args:
        input_norm: C1; None for whatever the layers have.
        grad_norm: C2; the same.
        mode: "clip" or "normalize"; the same.
        split: how the noise is divided over the parts: "optimal", "equal", or a weight for each part. Every trainable
            parameter is a part.

    Guarantee:
        Adjacency: zero-out (sensitivity C1 C2 for weights, C2 for bias, scale, shift and embedding, times the allowed
        uses of the layer) and replace-one (twice as much), under every sampling scheme that knows the adjacency but
        "partition". Constants that change while it trains must be chosen by what is public or was released.
        Unit: one record. All parts come from one sample and are one Gaussian release.
        Assumptions: each loss depends on its own example only, and row i of a layer belongs to example i (both
        checked by probes, which are lints and no proof). The graph of every batch is read: each trainable parameter
        must be used through its clipped layer only, no more often than allowed. Trainable weights are in float32 or
        float64, for sums are formed in their type. Losses are summed, not averaged, and the divisor is a constant. An
        input or an upstream gradient that is not finite counts as 0, and so do inputs longer than 2^50 C1 and gradients
        longer than 2^76 times their bound: float32 has no digits for both scales. Rows that fill up the batch of a
        compiled step weigh 0, under the assumption that backward passes return 0 for 0.
        Clips aim at (1 - 2^-10) of their bounds, which covers the rounding of an example's own terms: it is relative to
        the bound that is clipped, whatever cancels. Where products run in TF32 the stated sensitivity is larger by
        2^-6. This takes convolutions for sums of products, as implicit GEMM forms them: with Winograd's or Fourier's
        method the rounding of blank places is that of all of the input. Adding up B examples in float32 moves the sum
        by a few times B 2^-24 of the sensitivity, for which there is no noise, and by as much of B 2^-18 for biases,
        scales and shifts, whose terms may cancel to 2^-6 of their size before they are scaled up.
        Rounding in the passes of one example may depend on the others in the batch (torch chooses its products by
        sizes). It is taken to stay small: a network that makes it large, such as a chaotic recurrent one, moves all
        gradients of a batch with one record. Mode "normalize" scales gradients up, but none by more than C2 2^14: one
        that is nothing but rounding in float32 of a loss of ordinary size, where the true one is 0, stays 2^-10 of a
        bound. Rounding is 2^13 times as long in TF32 and 2^16 times under autocast, and as much longer as losses are
        multiplied by: use mode "clip" there if gradients may be 0. Layer and group norms of one or two numbers, behind
        which there is nothing but rounding, are refused in mode "normalize"; written by hand, they are not seen.
    """

    input_norm: Numbers | None = None
    grad_norm: Numbers | None = None
    mode: str | None = None
    split: Split = "optimal"

    name = "backprop"
    bounds_inside = True
    takes_views = False

    def __post_init__(self) -> None:
        with_plain_numbers(self)
        for argument in ("input_norm", "grad_norm"):
            given = getattr(self, argument)
            for value in given.values() if isinstance(given, Mapping) else () if given is None else (given,):
                clip_constant(argument, value)
        if self.mode is not None:
            one_of("mode", self.mode, MODES)
        require_split(self.split)

    def attach(self, site: Site) -> Clipper:
        """Bind to a model whose trainable parameters are all in clipped layers."""
        require_records(site.unit, "Backprop")
        require_entries(site.parameters, "Backprop")
        return BackpropClipper(site, self.layers_of(site.model, site.parameters))

    def layers_of(self, model: nn.Module, parameters: Parameters) -> dict[str, ClippedLayer]:
        """The clipped layers of a model, by name. Refused if they do not cover the parameters, or not as said here."""
        layers = clipped_layers(model)
        self._require_agreement(layers)
        _require_float32(parameters)
        most_of_each(parameters, layers)
        return layers

    def _require_agreement(self, layers: Mapping[str, ClippedLayer]) -> None:
        named = {layer.name: layer for layer in layers.values()}  # as clip_inputs called them
        for argument in ("input_norm", "grad_norm", "mode"):
            given = getattr(self, argument)
            if given is None:
                continue
            by_layer = given if isinstance(given, Mapping) else dict.fromkeys(named, given)
            require_layers(argument, by_layer, named)
            for name, layer in layers.items():
                here, has = by_layer[layer.name], getattr(layer.constants, argument)
                if here == has:
                    continue
                raise ConfigurationError(
                    f"Backprop has {argument}={here!r} and layer {name!r} has {has!r}: give clip_inputs and Backprop "
                    "the same, or leave it out here."
                )

    def require_losses(self, losses: Tensor, model: nn.Module, parameters: Parameters) -> None:
        layers = self.layers_of(model, parameters)
        nodes, _ = clipped_nodes(losses, parameters, layers.values())
        require_rows_of_examples(losses, nodes, parameters)

    def describe(self) -> dict[str, Any]:
        """The configuration in plain types; the clipper adds what the layers have."""
        return {
            "strategy": self.name,
            "split": self.split if isinstance(self.split, str) else dict(self.split),
        }


class BackpropClipper(Clipper):
    """`Backprop` for one model."""

    def __init__(self, site: Site, layers: Mapping[str, ClippedLayer]) -> None:
        self._parameters, self._layers = site.parameters, layers
        self.arithmetic = chosen_arithmetic(next(iter(site.parameters.values())).device)
        self.divisor = site.scheme.expected_size
        self._factor = site.factor * (1 + self.arithmetic.slack)
        self._take_constants()
        self._to_probe: dict[Wiring, int] = {}
        self._since_probe = 0

    def clipped_sum(self, losses: Tensor, real_B: Tensor | None = None) -> dict[str, Tensor]:
        """One backward pass of the summed losses.

        A row that only fills up a batch weighs 0: its upstream gradient is 0 in every layer, and 0 stays 0 whatever it
        is scaled by.
        """
        if len(losses) == 0:
            return self.nothing()
        self._require_same_constants()
        _require_float32(self._parameters)
        nodes, wiring = clipped_nodes(losses, self._parameters, self._layers.values())
        if real_B is None:  # a captured step may not wait for the device, and comes after ordinary ones
            self._probe(losses, nodes, wiring)
        weights_B = torch.ones_like(losses) if real_B is None else real_B.to(losses.dtype)
        with settled(), self.arithmetic.products():
            found = torch.autograd.grad(losses, list(self._parameters.values()), weights_B, allow_unused=True)
        sums = dict(zip(self._parameters, found, strict=True))
        for name, total in sums.items():
            if total is None:
                raise UnsupportedModelError(
                    f"Trainable parameter {name!r} takes no part in the losses, so its private gradient would be pure "
                    "noise. Freeze it with requires_grad_(False), or use it in the forward pass."
                )
        return sums

    @contextmanager
    def putting_aside(self) -> Iterator[PutAside]:
        """In this block examples that are not finite are noted, not cleared: see layers/clipped/switch.py."""
        aside = PutAside()
        with noting() as factors:
            yield aside
        if factors:
            aside.any(torch.cat(factors) == 0)

    def follow(self, is_updated: bool) -> bool:
        """Take over constants that were set since the last step."""
        if self._constants == self._constants_now():
            return False
        self._take_constants()
        return True

    def look_again(self) -> None:
        """The next ordinary step probes."""
        self._since_probe = _PROBED_AGAIN

    def state_dict(self) -> dict[str, Any]:
        """What the layers clip to."""
        return {
            "layers": {name: [*vars(c).values(), uses] for name, (c, uses) in self._constants_now().items()}
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Put constants back that were changed on the way; layers that clip in another way stay as they are."""
        saved, here = state.get("layers", {}), self.state_dict()["layers"]
        if {name: values[2:] for name, values in saved.items()} != {n: v[2:] for n, v in here.items()}:
            return False
        for name, layer in self._layers.items():
            input_norm, grad_norm = saved[name][:2]
            layer.constants = replace(layer.constants, input_norm=input_norm, grad_norm=grad_norm)
        return self.follow(is_updated=False)

    def _constants_now(self) -> dict[str, tuple[Constants, int]]:
        return {name: (layer.constants, layer.uses) for name, layer in self._layers.items()}

    def _take_constants(self) -> None:
        self._constants = self._constants_now()
        self.bounds = tuple(
            Bound(name, (name,), self._factor * most)
            for name, most in most_of_each(self._parameters, self._layers).items()
        )

    def _require_same_constants(self) -> None:
        """The noise is for the constants that were there when the batch was drawn."""
        for name, now in self._constants_now().items():
            if now != self._constants[name]:
                raise StepError(
                    f"Layer {name!r} was given other constants between the draw of a batch and its step. Call "
                    "layers.set_clips after a step and before the next batch is drawn."
                )

    def _probe(self, losses: Tensor, nodes: list[Any], wiring: Wiring) -> None:
        """On the first batches of every wiring, and now and then: a single example shows nothing."""
        self._since_probe += 1
        left = self._to_probe.setdefault(wiring, _PROBED_BATCHES)
        if len(losses) < 2 or not (left or self._since_probe >= _PROBED_AGAIN):
            return
        require_rows_of_examples(losses, nodes, self._parameters)
        self._to_probe[wiring], self._since_probe = max(0, left - 1), 0


def clipped_layers(model: nn.Module) -> dict[str, ClippedLayer]:
    """By name. Refused if there are none."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, ClippedLayer)}
    if not layers:
        raise UnsupportedModelError(
            "The model has no clipped layers, so nothing bounds its gradients: call "
            "clipwise.layers.clip_inputs(model, input_norm=..., grad_norm=...) before make_private."
        )
    return layers


def _require_float32(parameters: Parameters) -> None:
    """torch sums gradients in the type of the weights, and a sum in 8 or 11 bits is no sum of bounded terms."""
    for name, p in parameters.items():
        if torch.finfo(p.dtype).bits < 32:
            raise UnsupportedModelError(
                f"Parameter {name!r} has the type {p.dtype}, in which sums over a batch are rounded by more than the "
                "sensitivity allows. Keep trainable weights in float32 (model.float()), and run the forward pass "
                "under torch.autocast for speed."
            )


def most_of_each(parameters: Parameters, layers: Mapping[str, ClippedLayer]) -> dict[str, float]:
    """The most that one example adds to each parameter's gradient: what its uses add, one by one."""
    most: dict[int, float] = {}
    for where, layer in layers.items():
        bounds = layer.bounds()
        # A parameter may have several names within one layer, such as biases that are tied: each is a use.
        for name, p in layer.layer.named_parameters(remove_duplicate=False):
            if name not in bounds:
                raise UnsupportedModelError(
                    f"Layer {where!r} ({type(layer.layer).__name__}) has a parameter {name!r}, for which there is no "
                    "bound: take parametrizations such as weight_norm off, or train with PerExample(max_norm=...)."
                )
            most[id(p)] = most.get(id(p), 0.0) + layer.uses * bounds[name]
    for name, p in parameters.items():
        if id(p) not in most:
            raise UnsupportedModelError(
                f"Parameter {name!r} is trainable and in no clipped layer: call clip_inputs after all changes to the "
                "model, or freeze it with requires_grad_(False)."
            )
    return {name: most[id(p)] for name, p in parameters.items()}
