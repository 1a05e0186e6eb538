"""What is refused, and why. No message carries a data value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.parameter import is_lazy

from clipwise import guards
from clipwise.drawn_size import DrawnSize
from clipwise.errors import ConfigurationError, CoupledExamplesError, StepError, UnsupportedModelError
from clipwise.gradients.layout import LARGEST_WEIGHT, Probe, private_generator, probe_weights, surviving
from clipwise.gradients.opaque import require_not_rerun
from clipwise.gradients.precision import ieee_arithmetic
from clipwise.gradients.walk import Node
from clipwise.inventory import Inventory
from clipwise.layers.batch_statistics import BatchStatisticsNorm, ReleasedStatisticsNorm
from clipwise.layers.clipped import unclipped
from clipwise.layers.observed import observations
from clipwise.real_views import real_view
from clipwise.structure import map_tensors, tensors_in

_PROBED_BATCHES = 2


def trainable_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """The parameters to train privately, which are those of the model and of the optimizer alike."""
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"model must be a torch.nn.Module, not {type(model).__name__}.")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(
            f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigurationError(
            "optimizer is LBFGS, which asks for several gradients of one batch a step: use SGD, Adam or another "
            "that takes one."
        )
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise ConfigurationError("model has no trainable parameter: every requires_grad is False.")
    known = {id(p) for p in model.parameters()}
    held = set()
    for number, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if id(p) not in known:
                raise ConfigurationError(
                    f"optimizer holds a parameter of shape {tuple(p.shape)} (group {number}) that the model "
                    "does not: build the optimizer from this model's parameters, after all changes to it."
                )
            held.add(id(p))
    forgotten = [name for name, p in trainable.items() if id(p) not in held]
    if forgotten:
        raise ConfigurationError(
            f"Parameter {forgotten[0]!r} is trainable but the optimizer does not hold it: add it to the "
            "optimizer, or freeze it with requires_grad_(False)."
        )
    guards.require_no_hooks(trainable)
    return trainable


def require_real(parameters: Mapping[str, nn.Parameter], strategy: str) -> None:
    """Refuse complex parameters, for a strategy that does not know them."""
    for name, p in parameters.items():
        if p.is_complex():
            raise ConfigurationError(
                f"Parameter {name!r} is {p.dtype}, and clipping={strategy} is for real parameters. Keep it as pairs of "
                "real numbers and call torch.view_as_complex in forward, or use PerExample or Batch without sparse."
            )


_USE_BATCH = (
    "Batch(max_norm=...) clips whole mini-sets instead, within which examples may depend on one another; it needs "
    "far more noise"
)


_LEARNED = (
    "What it has learned from private data so far must not leave with the model: call reset_running_stats() on it, or "
    "load statistics from before."
)
_COUPLED = (
    "The loss of one example depends on the inputs of another, so clipping single examples bounds nothing. Usual "
    "causes: batch statistics, subtracting a mean over the batch, a loss that compares examples or is divided by "
    "something of the whole batch. clipwise.check(model, loss, batch) helps to find the place. If the coupling is "
    f"meant, {_USE_BATCH}."
)
_COUPLED_ROWS = (
    "A row that a layer of clipwise.layers.with_released_statistics gets depends on the inputs of another example than "
    "its own, so its statistics would not be bounded by clipping single rows. Usual causes: batch statistics before "
    f"it, or rows in another order than the examples. If the coupling is meant, {_USE_BATCH}."
)


def require_no_batch_statistics(model: nn.Module, is_coupled: bool = False) -> None:
    """Refuse layers that keep statistics of private data, or that mix the examples of a batch if that is not bounded.

    `is_coupled` says that it is: that mini-sets are clipped as a whole.
    """
    for name, module in model.named_modules():
        require_no_statistics_in(name, module, is_coupled)


def require_no_statistics_in(name: str, module: nn.Module, is_coupled: bool = False) -> None:
    """The same of a single layer."""
    kind = type(module).__name__
    if isinstance(module, ReleasedStatisticsNorm):
        return  # its statistics are constants that follow from releases
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        if is_coupled:
            _require_no_running_statistics(name, module)
            return
        if module.training:
            raise UnsupportedModelError(
                f"Layer {name!r} ({kind}) is in training mode: it mixes the examples of a batch, so one record moves "
                "every clipped gradient, and its running statistics leak. Replace it by GroupNorm, LayerNorm or a "
                "layer with public statistics (clipwise.layers.replace_batchnorm does), or freeze its statistics with "
                f".eval(). {_LEARNED} {_USE_BATCH}."
            )
        if module.running_mean is None or _has_no_statistics(module):
            raise UnsupportedModelError(
                f"Layer {name!r} ({kind}) keeps no running statistics, so it mixes the examples of a batch even in "
                f".eval(). Replace it by GroupNorm or LayerNorm (clipwise.layers.replace_batchnorm does). {_USE_BATCH}."
            )
    keeps = isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats
    if keeps and module.training:
        raise UnsupportedModelError(
            f"Layer {name!r} ({kind}) keeps running statistics of private data. "
            f"Build it with track_running_stats=False, or freeze it with .eval(). {_LEARNED}"
        )


def _has_no_statistics(module: nn.Module) -> bool:
    return isinstance(module, BatchStatisticsNorm) and not module.has_statistics


def _require_no_running_statistics(name: str, module: nn.modules.batchnorm._BatchNorm) -> None:
    """Statistics of the batch may be used: the clip bounds what comes of them. To keep them is no part of that.

    A layer of torch's that keeps none fails on a draw of one record, and its message tells the size drawn.
    """
    if isinstance(module, BatchStatisticsNorm) or not (module.training or module.running_mean is None):
        return
    trouble = (
        "would fail on a mini-set of one record, which a random draw may bring"
        if module.running_mean is None
        else "would update running statistics from private data, and they would leave with the model without any noise"
    )
    raise UnsupportedModelError(
        f"Layer {name!r} ({type(module).__name__}) {trouble}. Call "
        "clipwise.layers.without_running_statistics(model) before make_private: the layer then uses the statistics of "
        "each batch. For evaluation, Batch(..., running_statistics=NoisedStatistics()) learns them from noised "
        "releases, and clipwise.layers.recompute_statistics(model, public_batches) sets them from public data."
    )


def require_losses(losses: object, size: int, is_coupled: bool = False) -> Tensor:
    """One loss an example, attached to a graph. The size drawn is secret and not in the messages.

    Where mini-sets are clipped as a whole, a single number will do. Of a mini-set without examples it says nothing.
    """
    if not isinstance(losses, Tensor):
        raise StepError(f"losses must be a tensor with one loss an example, not {type(losses).__name__}.")
    if is_coupled and size == 0 and (losses.dim() == 0 or losses.shape == (0,)):
        return torch.zeros(0)  # whatever it is, and of whatever type: no example is in it
    if losses.dim() == 0 and not is_coupled:
        raise StepError(
            "losses is a single number, so the examples can no longer be told apart. Give one loss an "
            "example: use reduction='none' and no mean or sum over the batch."
        )
    if losses.dim() > 1:
        raise StepError(
            f"losses has {losses.dim()} dimensions. Give one loss an example: sum or average each example's "
            "own positions, for instance losses.flatten(1).sum(1)."
        )
    if losses.dim() == 1 and len(losses) != size:
        raise StepError(
            "losses does not have one entry for each example of the batch that private.loader handed out. "
            "Do not drop, repeat or pool examples."
        )
    if not losses.is_floating_point():
        raise StepError(f"losses is {losses.dtype}: it must be real floating point.")
    if not losses.requires_grad:
        raise StepError(
            "losses carries no gradient: compute it from the model's output, with gradients enabled "
            "(no torch.no_grad, no .detach())."
        )
    return losses


def require_rows(batch: object, size: int) -> None:
    """The batch given to a compiled step must be the one that was handed out. Its size is secret."""
    rows = {len(t) for t in tensors_in(batch) if t.dim()}
    if rows != {size}:
        raise StepError(
            "step(*batch) takes the batch that private.loader handed out last: tensors whose first dimension "
            "counts its examples. Do not drop, repeat or pool examples, and put nothing else into it."
        )


class BufferGuard:
    """Nothing that a buffer, a parameter or an attribute learned in a forward pass may leave with the model."""

    def __init__(self, model: nn.Module) -> None:
        self.inventory = Inventory(model)
        self._versions: dict[str, tuple[object, ...]] = {}
        self._held: list[Tensor] = []  # while they are, no other tensor gets their identity
        self._left = _PROBED_BATCHES  # batches on which contents are looked at: `.data` changes no version
        self._statistics: dict[str, list[tuple[int, int]]] = {}

    def remember(self) -> None:
        """Called when a batch is handed out."""
        self.inventory.up_to_date()
        self._versions, self._held = self._now()
        self._statistics = self._statistics_now()

    def changed_statistics(self) -> list[str]:
        """The modules whose running statistics were changed since `remember`."""
        now = self._statistics_now()
        return [name for name, before in self._statistics.items() if now.get(name, before) != before]

    def _statistics_now(self) -> dict[str, list[tuple[int, int]]]:
        return {
            name: [(id(b), b._version) for b in module.buffers(recurse=False)]
            for name, module in self.inventory.statistics
        }

    def compare(self) -> None:
        """Called when its losses come back."""
        self.inventory.up_to_date()
        self.compare_listed()

    def compare_listed(self) -> None:
        """The same, for who has brought the inventory up to date."""
        now, held = self._now()
        if now != self._versions:
            for name, version in now.items():
                if self._versions.get(name) != version:
                    raise UnsupportedModelError(
                        f"{name} was set or changed between the draw of a batch and private.step, as in a forward "
                        "pass that learns. What it learned from private data would leave with the model without any "
                        "noise. Set it before the first batch, from public data; update parameters before the next "
                        "batch is drawn; what forward computes for the loss, let it return."
                    )
        if self._left:
            self._left -= 1
            now, held = self._now()  # contents may be looked at no longer
        self._versions, self._held = now, held

    def _now(self) -> tuple[dict[str, tuple[object, ...]], list[Tensor]]:
        found = [
            (name, t) for name, tensors, key in self.inventory.tensors if (t := tensors[key]) is not None
        ]
        versions: dict[str, tuple[object, ...]]
        if self._left:
            versions = {name: (id(t), t._version, *_digest(t)) for name, t in found}
        else:
            versions = {name: (id(t), t._version) for name, t in found}
        return versions, [t for _, t in found]


def _digest(tensor: Tensor) -> tuple[float, ...]:
    """Numbers that hardly stay what they are when the contents change."""
    if is_lazy(tensor):
        return ()
    values = real_view(tensor.detach()).double().nan_to_num()
    return float(values.sum()), float(values.abs().sum())


class IndependenceProbe:
    """d loss_i / d input_j must be 0 for i != j, on the first batches (see gradients/layout.py).

    A lint, not a proof: it sees what a gradient shows, on the inputs that are floating point and, for
    ids, at what trainable embeddings make of them.
    """

    def __init__(self) -> None:
        self._left = _PROBED_BATCHES
        self._drawn_size = DrawnSize()
        self._leaves: list[Tensor] = []
        self._ids: list[Tensor] = []

    def mark(self, batch: Any) -> Any:
        """Let a batch's inputs carry gradients, while the probe still looks."""
        self._leaves, self._ids = [], []
        return map_tensors(self._marked, batch) if self._left else batch

    def examine(self, losses: Tensor) -> None:
        """Refuse losses that depend on other examples' inputs, or on how many there are."""
        self._drawn_size.examine(losses)
        if len(losses) < 2 or not (self._leaves or self._ids):
            return
        inputs = [*map(get_gradient_edge, self._leaves), *_lookups(losses, self._ids)]
        weights_B = probe_weights(len(losses), losses)
        finite = self._is_apart(losses, torch.ones_like(losses), inputs, weights_B, _COUPLED)
        for seen, output in observations(
            losses
        ):  # what a layer learns of a row must be of that example alone
            if seen.shape[0] == len(losses):
                random = torch.randn(seen.shape, generator=private_generator()).to(
                    seen.mean_BC.device, seen.dtype
                )
                finite &= self._is_apart(output, random, inputs, weights_B, _COUPLED_ROWS)
        # Only a batch that passed: who tries again after a refusal is looked at again. And one NaN can hide
        # what all others share.
        self._left, self._leaves, self._ids = self._left - finite, [], []

    def _is_apart(
        self,
        outputs: Tensor | GradientEdge,
        plain: Tensor,
        inputs: list[GradientEdge],
        weights_B: Tensor,
        refusal: str,
    ) -> bool:
        """Refuse outputs, one row an example, that depend on other examples' inputs. Whether gradients were finite.

        `plain` is what the outputs are multiplied with before they are added up.
        """

        def gradients(given: Tensor) -> tuple[Tensor | None, ...]:
            with ieee_arithmetic(), unclipped():
                return torch.autograd.grad(outputs, inputs, given, retain_graph=True, allow_unused=True)

        if not inputs:
            return True
        # If one example depends on another, it is seen where the other has the larger weight: in one of these two.
        both = (weights_B, LARGEST_WEIGHT / weights_B)
        found, *weighted = (gradients(w) for w in (plain, *(plain * _by_row(w_B, plain) for w_B in both)))
        thrice: tuple[Tensor | None, ...] = ()
        finite = True
        for number, p in enumerate(found):
            ws = [w for w in (each[number] for each in weighted) if w is not None]
            if p is None or len(ws) < len(both):
                continue
            finite &= bool(torch.isfinite(p).all())
            probes = [Probe(p, w, w_B.to(p.device)) for w, w_B in zip(ws, both, strict=True)]
            layouts = surviving(probes)
            if not layouts and not probes[0].repeats:  # it may be rounding
                thrice = thrice or gradients(3 * plain)
                layouts = surviving([replace(probe, thrice=thrice[number]) for probe in probes])
            if number < len(self._leaves) and len(p) == len(weights_B):
                # As the loader hands them out: one loss a *position*, of all examples, is none an example.
                layouts = [layout for layout in layouts if layout.axis == 0]
            # Where the plain sum is 0 the weighted one must be too: sum_i (l_i - mean l) hides every example.
            if not layouts and any(bool(w.any()) for w in ws):
                raise CoupledExamplesError(refusal)
        return finite

    def _marked(self, value: Tensor) -> Tensor:
        if value.dim() == 0:
            return value  # a number of the whole batch, and no example's
        if not (value.is_floating_point() or value.is_complex()) or value.requires_grad:
            self._ids.append(value)
            return value
        leaf = value.detach().requires_grad_()
        self._leaves.append(leaf)
        return leaf.clone()  # not a leaf itself, so that the model may work on it in place


def _by_row(weights_B: Tensor, like: Tensor) -> Tensor:
    """One weight a row, in a shape that broadcasts to a tensor's."""
    return weights_B.to(like).view(-1, *[1] * (like.dim() - 1))


def _lookups(losses: Tensor, ids: list[Tensor]) -> list[GradientEdge]:
    """What embeddings made of these ids, as edges of the losses' graph."""
    edges: list[GradientEdge] = []
    root: Node = losses.grad_fn
    entered, stack = {root}, [root]
    while stack:
        node = stack.pop()
        require_not_rerun(node.name())
        saved = getattr(node, "_saved_indices", None)
        if isinstance(saved, Tensor) and any(_same_ids(saved, x) for x in ids):
            edges.append(GradientEdge(node, 0))
        for child, _ in node.next_functions:
            if child is not None and child not in entered:
                entered.add(child)
                stack.append(child)
    return edges


def _same_ids(saved: Tensor, ids: Tensor) -> bool:
    """Whether these are the ids of the batch: a view of them, or a copy on another device or in another type."""
    if saved.untyped_storage().data_ptr() == ids.untyped_storage().data_ptr():
        return True
    return saved.shape == ids.shape and torch.equal(saved, ids.to(saved))
