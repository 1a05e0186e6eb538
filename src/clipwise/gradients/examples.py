"""Per-example gradients of parameters: from single uses to parameters, and their norms and weighted sums.

A use gives gradients with respect to its input tensor, which may be computed from parameters: transposes, views, casts,
normalised or adapted weights. If that tensor is a view of one parameter (an *isometric* path), the norm is the
parameter's own, and only the weighted sum is carried back. Otherwise each example's gradient is written out and carried
back separately.

All uses of a parameter are joined before any norm is taken. |g1 + g2|^2 is not |g1|^2 + |g2|^2: a tied weight or a
module called twice needs the cross terms. Products (or rows) are joined by concatenating their positions, a product and
rows of one table by their cross term (forms/rows.py). All other uses are written out per example and added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from clipwise.gradients.forms import Budget, Form, Head, Outer, Rows, Tied, Written, at_least_float32
from clipwise.gradients.forms.base import bytes_of
from clipwise.gradients.outline import BY_HAND, CASTS, TRANSPOSE, Route
from clipwise.gradients.precision import IEEE, Arithmetic, Rare, ieee_arithmetic
from clipwise.gradients.walk import Graph, Node, dtype_at, node_name
from clipwise.kernels.tracing import is_tracing

KEEP_BYTES = 768 * 2**20  # per-example gradients kept from the norms to the weighted sum, on a CPU
_KEEP_SHARE = 1 / 16  # of a CUDA device's memory
_CACHED_BYTES = 8 * 2**20  # of gradients that are written out at once on a CPU
_TRANSPOSE = (TRANSPOSE,)

Parameters = Mapping[str, torch.nn.Parameter]


@dataclass(eq=False)
class Path:
    """From the input tensor of a use (an output of `source`) back to the parameters behind it."""

    source: Node
    number: int
    parameters: Parameters
    isometric: bool
    steps: tuple[str, ...] = ()  # the operations of an isometric path, without casts
    nodes: tuple[Node, ...] = ()  # their nodes; empty if autograd is not needed

    @classmethod
    def identity(cls, name: str, parameter: torch.nn.Parameter) -> Path:
        """The empty path: the gradients are the parameter's own."""
        return cls(None, 0, {name: parameter}, True)

    def pull(self, gradient: Tensor) -> Tensor:
        """Carry one gradient back on an isometric path, in its own precision, float32 or better.

        It is a sum over examples. Rounding it to the bfloat16 of a weight under autocast, as autograd would, changes it
        by 2^-9 of *its* norm, which depends on all examples.
        """
        if self.steps == _TRANSPOSE:
            gradient = gradient.t()
        for node in self.nodes:
            if node_name(node) not in CASTS:
                gradient = node(gradient)
        (parameter,) = self.parameters.values()
        gradient = gradient if gradient.dtype is torch.float32 else at_least_float32(gradient)
        return gradient.to(parameter.device)

    def pull_each(self, gradients_b: Tensor, name: str) -> Tensor:
        """Carry the gradients of several examples back to one parameter, each separately: [b, ...]."""
        if self.isometric and self.steps in BY_HAND:
            transposes = self.steps == _TRANSPOSE and gradients_b.dim() == 3
            return (gradients_b.mT if transposes else gradients_b).to(self.parameters[name].device)
        gradients_b = gradients_b.to(dtype_at(self.source, self.number))
        back = partial(self._backward, name)
        try:
            return torch.vmap(back)(gradients_b)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # torch cannot batch an operation of the path
            return torch.stack([back(gradient) for gradient in gradients_b])

    def _backward(self, name: str, gradient: Tensor) -> Tensor:
        edge = torch.autograd.graph.GradientEdge(self.source, self.number)
        (found,) = torch.autograd.grad(
            [edge], [self.parameters[name]], [gradient], retain_graph=True, materialize_grads=True
        )
        return found


def paths_in(graph: Graph, parameters: Parameters) -> list[dict[int, Path]]:
    """For each use, the paths of its operands. Paths without autograd keep no node of the graph alive."""

    def path(way: Route) -> Path:
        behind = {name: parameters[name] for name in way.parameters}
        if way.is_by_hand:
            return Path(None, 0, behind, True, way.steps)
        nodes = tuple(graph.order[i] for i in way.places)
        return Path(graph.order[way.source], way.number, behind, way.isometric, way.steps, nodes)

    return [{j: path(way) for j, way in ways.items()} for ways in graph.plan.routes]


class Contribution(NamedTuple):
    """The gradients of one use with respect to one tensor, and that tensor's path to the parameters."""

    form: Form
    path: Path


class PerExampleGradients:
    """The per-example gradients of one batch, keyed by parameter name."""

    def __init__(
        self, batch: int, by_parameter: dict[str, Contribution], arithmetic: Arithmetic = IEEE, rare: Rare | None = None
    ) -> None:
        self.batch = batch
        self.by_parameter = by_parameter
        self._arithmetic, self._rare = arithmetic, rare or Rare()

    @classmethod
    def written(cls, gradients: Mapping[str, Tensor], parameters: Parameters) -> PerExampleGradients:
        """Wrap computed gradients: [B, *shape] for each parameter."""
        batch = len(next(iter(gradients.values())))
        return cls(
            batch,
            {
                name: Contribution(Written.of(at_least_float32(g)), Path.identity(name, parameters[name]))
                for name, g in gradients.items()
            },
        )

    @torch.no_grad()
    def squared_norms(self) -> dict[str, Tensor]:
        """Upper bounds on each example's squared norm, for each parameter: [B] in float64."""
        devices = {p.device for c in self.by_parameter.values() for p in c.path.parameters.values()}
        budget = Budget(keep_bytes(devices), self._arithmetic)
        with self._arithmetic.products():
            squares = {name: c.form.squared_norms(budget) for name, c in self.by_parameter.items()}
            loose = [c.form.loose_B for c in self.by_parameter.values() if c.form.loose_B is not None]
            if loose and self._rare.any(torch.stack(loose)):
                for name, c in self.by_parameter.items():
                    c.form.tighten(squares[name], budget)
        return squares

    def squared_errors(self) -> dict[str, Tensor]:
        """The squared error that rounded operands can add to the norms, for the parameters affected: [B] in float64.

        Available after `squared_norms`.
        """
        found = {name: c.form.squared_error_B for name, c in self.by_parameter.items()}
        return {name: error_B for name, error_B in found.items() if error_B is not None}

    def mute(self, muted_B: Tensor) -> None:
        """Make the gradients of these examples 0."""
        for c in self.by_parameter.values():
            c.form.mute(muted_B)

    @torch.no_grad()
    def weighted_sums(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """sum_i w_i gradient_i for each parameter, with its own weights [B]; in float32 or better."""
        with self._arithmetic.products():
            return {name: c.path.pull(c.form.weighted_sum(weights[name])) for name, c in self.by_parameter.items()}

    @torch.no_grad()
    def instantiate(self, examples: slice) -> dict[str, Tensor]:
        """The gradients of some examples, written out: [b, *shape]."""
        with ieee_arithmetic():
            return {name: c.path.pull_each(c.form.instantiate(examples), name) for name, c in self.by_parameter.items()}

    def mass(self, example: int) -> float:
        """The norm of the terms that sum to an example's gradient, over all parameters."""
        return math.hypot(*(c.form.mass(example) for c in self.by_parameter.values()))


def keep_bytes(devices: set[torch.device]) -> int:
    """The number of bytes of per-example gradients that may be kept."""
    cuda = [device for device in devices if device.type == "cuda"]
    if not cuda:
        return KEEP_BYTES
    return int(min(torch.cuda.get_device_properties(d).total_memory for d in cuda) * _KEEP_SHARE)


def joined(name: str, parameter: torch.nn.Parameter, uses: list[Contribution]) -> Contribution:
    """One contribution from several uses of a parameter, or from one use with a path that is not isometric."""
    if all(c.path.isometric for c in uses):
        form = _side_by_side(uses)
        if form is not None:
            return Contribution(form, Path.identity(name, parameter))
    return written_out(name, parameter, parameter.dtype, uses)


def written_out(name: str, parameter: torch.nn.Parameter, dtype: torch.dtype, uses: list[Contribution]) -> Contribution:
    """The sum of all uses of one parameter, written out per example."""

    def make(examples: slice) -> Tensor:
        each = (c.path.pull_each(c.form.instantiate(examples), name) for c in uses)
        total = next(each)
        for gradients in each:
            total = total + gradients
        return total

    written = Written(uses[0].form.batch, parameter.shape, dtype, make, _piece(parameter, dtype))
    return Contribution(written, Path.identity(name, parameter))


def _piece(parameter: torch.nn.Parameter, dtype: torch.dtype) -> int | None:
    """How many gradients to write out at once on a CPU: paths of several operations pass through them repeatedly."""
    if parameter.device.type != "cpu" or is_tracing():
        return None
    return max(1, _CACHED_BYTES // max(1, bytes_of(1, parameter.shape, dtype)))


def _factors(c: Contribution) -> tuple[Tensor, Tensor] | None:
    """Both factors of a product, with respect to the parameter itself, if the path is empty or a transpose."""
    if not isinstance(c.form, Outer):
        return None
    left, right = c.form.left, c.form.right
    return {(): (left, right), _TRANSPOSE: (right, left)}.get(c.path.steps)


def _side_by_side(uses: list[Contribution]) -> Form | None:
    """Concatenates the positions of products, and the entries of lookups, in one form of each kind."""
    products = [factors for c in uses if (factors := _factors(c)) is not None]
    others = [c.form for c in uses if not isinstance(c.form, Outer) and c.path.steps == ()]
    if len(products) + len(others) < len(uses):
        return None
    heads = [f for f in others if isinstance(f, Head)]
    rows = [f for f in others if isinstance(f, Rows)]
    if len({t.device for t in [*(f.g for f in rows), *(factor for pair in products for factor in pair)]}) > 1:
        return None
    if len(rows) < len(others) or len({f.V for f in rows}) > 1:
        if len(heads) == 1 and len(rows) == len(uses) - 1 and {f.V for f in rows} <= {heads[0].shape[0]}:
            return heads[0].with_rows(_one_table(rows)) if rows else heads[0]
        return None  # some index whole rows, others single entries
    outer = _one_product(products, uses) if products else None
    table = _one_table(rows) if rows else None
    if outer is None or table is None:
        return outer or table
    return Tied(outer, table) if outer.shape == table.shape and outer.shape[0] == table.V else None


def _one_product(factors: list[tuple[Tensor, Tensor]], uses: list[Contribution]) -> Outer:
    left, right = factors[0] if len(factors) == 1 else (torch.cat(parts, 1) for parts in zip(*factors, strict=True))
    upright = (c.form.shape for c in uses if isinstance(c.form, Outer) and c.path.steps == ())
    return Outer(left, right, next(upright, None), upright=True)


def _one_table(rows: list[Rows]) -> Rows:
    if len(rows) == 1:
        return rows[0]
    entries = zip(*((f.example, f.ids, f.g) for f in rows), strict=True)
    example, ids, g = (torch.cat(parts) for parts in entries)
    each = sum(f.each for f in rows if f.each is not None) if all(f.each for f in rows) else None
    return Rows(example, ids, g, rows[0].batch, rows[0].shape, each)
