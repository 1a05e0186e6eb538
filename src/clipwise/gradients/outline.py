"""The structure that the graphs of one model share between batches (operations and wiring, without sizes), and tables
of operations by their names in torch.

A node is identified by its place in the order of the walk. Everything that follows from the wiring alone (which places
are uses, the parameters behind them, where hooks go) is computed once per outline and reused for every later graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from clipwise.errors import UnsupportedModelError

ACCUMULATE = "torch::autograd::AccumulateGrad"


def named(*operations: str) -> frozenset[str]:
    """The names of these operations' backward nodes; overloads are numbered."""
    return frozenset(f"{name}Backward{number}" for name in operations for number in range(3))


# Backward functions that preserve the norm: they move entries or pad them with zeros. A cast rounds by less than a
# relative unit roundoff.
ISOMETRIC = named(
    *("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Alias", "Unsqueeze", "Squeeze"),
    *("Clone", "ToCopy", "Slice", "Select", "Narrow", "Neg", "Flip", "Movedim"),
    *("ViewAsReal", "ViewAsComplex", "Conj", "ConjPhysical"),
)
CASTS = named("ToCopy")
# A cast between these does not preserve it: the imaginary part of a gradient is dropped.
CROSSES = "between real and complex"

# Functions of one tensor and constants: DERIVED if that tensor is, for any batch.
PURE = ISOMETRIC | named(
    *("Split", "SplitWithSizes", "Unbind", "Exp", "Log", "Sqrt", "Rsqrt", "Pow", "Abs", "Sigmoid", "Tanh"),
    *("Relu", "Softplus", "Softmax", "Sum", "Mean", "Norm", "LinalgVectorNorm", "Tril", "Triu"),
    *("Angle", "FftR2C", "FftC2C", "FftC2R"),
)

# Functions of their tensor arguments alone: DERIVED if all arguments are in the graph and DERIVED.
CLOSED = PURE | named(
    *("Mm", "Bmm", "Addmm", "Add", "Sub", "Mul", "Div", "Cat", "Stack", "Complex", "Polar"), "WeightNormInterface"
)

# Nodes that can reorder rows depending on the data: no layout is reused for another batch then.
ROW_MOVERS = named(
    *("Index", "IndexSelect", "IndexPut", "IndexPutImpl", "IndexAdd", "IndexCopy", "Gather", "Scatter"),
    *("ScatterAdd", "Sort", "Topk", "MaskedSelect", "MaskedScatter", "TakeAlongDim", "Take", "AsStrided"),
    *("ScatterReduce", "IndexReduce", "SegmentReduce", "PackPaddedSequence", "Embedding", "EmbeddingBag"),
) | {"torch::autograd::CopySlices"}

# Nodes that select rows of a table, and where they hold the indices.
LOOKUPS = {
    "EmbeddingBackward0": "_saved_indices",
    "IndexBackward0": "_saved_indices",
    "IndexSelectBackward0": "_saved_index",
}

# Arguments that split a tensor: the data may choose them, so they are part of an outline.
CUTS = {
    "SelectBackward0": ("_saved_index",),
    "SliceBackward0": ("_saved_start", "_saved_end"),
    "SplitWithSizesBackward0": ("_saved_split_sizes",),
}

# The different ways to transpose a weight are equivalent.
TRANSPOSE = "TBackward0"
TURNS = frozenset({"PermuteBackward0", "TransposeBackward0"})


COMPILED = "CompiledFunctionBackward"  # the node of a compiled region
REENTRANT = "CheckpointFunctionBackward"  # of a checkpoint with use_reentrant=True
REFUSALS = {
    COMPILED: "A part of the model or of the loss was compiled with torch.compile, and make_private did not see it. "
    "Its backward pass is one unit, in which per-example gradients are not accessible. Give make_private the compiled "
    "model, which then runs uncompiled where gradients are needed, or compute the losses without torch.compile. "
    "private.compiled(loss) compiles the whole private step. Batch(max_norm=...) takes compiled models.",
    REENTRANT: "Reentrant activation checkpointing hides the parameters inside it. Call "
    "torch.utils.checkpoint.checkpoint(..., use_reentrant=False) instead.",
}
_SAID_BY_TORCH = {COMPILED: "donated buffer", REENTRANT: "use_reentrant=True"}


def require_not_rerun(*names: str) -> None:
    """Raise for a part of the model that runs again in the backward pass: the graph does not show its contents."""
    if REENTRANT in names:
        raise UnsupportedModelError(REFUSALS[REENTRANT])


def explain(error: RuntimeError) -> None:
    """Raise clipwise's explanation of an error of torch about such a part."""
    for part, text in _SAID_BY_TORCH.items():
        if text in str(error):
            raise UnsupportedModelError(REFUSALS[part]) from None


Inputs = tuple[tuple[int, int], ...]  # place (-1: none) and output of each input of a node
BY_HAND = ((), (TRANSPOSE,))  # routes along which gradients are carried without autograd
_AGREEING_BATCHES = 2
_MOST_TRIES = 6  # with inconclusive examples


class OutlineEntry(NamedTuple):
    """A place: an operation with its inputs, or a parameter's name.

    `cuts` records where the operation splits along the examples, if it does; or that it transposes a tensor made of
    parameters or casts it between real and complex numbers.
    """

    name: str
    inputs: Inputs | None  # None: a parameter
    cuts: object = None


@dataclass(frozen=True)
class UsePlan:
    """A place that carries examples and takes tensors computed from parameters alone: operand -> (place, output)."""

    index: int
    operands: dict[int, tuple[int, int]]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Route:
    """The route from an input of a use back to the parameters behind it."""

    source: int
    number: int
    parameters: tuple[str, ...]
    isometric: bool
    places: tuple[int, ...]  # of an isometric route
    steps: tuple[str, ...]  # the operations at these places, without casts: gradients keep their precision

    @cached_property
    def is_by_hand(self) -> bool:
        """Whether gradients are carried back without autograd."""
        return self.isometric and self.steps in BY_HAND


class Operand(NamedTuple):
    """An input of a use that is computed from parameters: the index of the use, and the input position."""

    use: int
    number: int


@dataclass
class Trust:
    """Records which operands in graphs of one outline agreed with plain autograd (selfcheck.py)."""

    _agreed: Counter[Operand] = field(default_factory=Counter)
    _tried: Counter[Operand] = field(default_factory=Counter)
    settled: GraphPlan | None = None  # all of its operands are trusted

    def open_in(self, plan: GraphPlan) -> list[Operand]:
        """The operands that are not yet trusted."""
        found = [Operand(use.index, j) for use in plan.uses for j in use.operands]
        found = [o for o in found if self._agreed[o] < _AGREEING_BATCHES and self._tried[o] < _MOST_TRIES]
        self.settled = None if found else plan
        return found

    def note(self, operand: Operand, agrees: bool) -> None:
        """Record that an example with a gradient at this use agreed, or was inconclusive."""
        (self._agreed if agrees else self._tried)[operand] += 1


class Outline:
    """The structure of one kind of graph. Outlines are equal if all entries are; the hash is cached."""

    def __init__(
        self, entries: tuple[OutlineEntry, ...], output: int, cutting: tuple[int, ...], movers: tuple[int, ...]
    ) -> None:
        """`output`: which output of the last place the losses are. `cutting`: the places with `cuts` to compare.

        `movers`: the places where data can reorder rows.
        """
        self.entries, self.output, self.cutting, self.movers = entries, output, cutting, movers
        self.moves_rows = bool(movers)
        self.parameters = {i: entry.name for i, entry in enumerate(entries) if entry.inputs is None}
        # Each place before its inputs: the order in which graphs are compared, from the losses on.
        self.backwards = [(i, e.name, e.inputs) for i, e in reversed(list(enumerate(entries)))]
        self.trust = Trust()
        # By sizes of an example at both ends: the largest batch that fits into memory, the smallest that does not.
        self.fits: dict[tuple[int, ...], tuple[float, float]] = {}
        self.settled: GraphPlan | None = None  # of graphs with known layouts
        self._hash = hash((entries, output))
        self._plan: GraphPlan | None = None

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Outline) and (self.output, self.entries) == (other.output, other.entries)

    @cached_property
    def outputs(self) -> list[tuple[int, ...]]:
        """The outputs of each place that other places use, sorted."""
        taken: list[set[int]] = [set() for _ in self.entries]
        taken[-1].add(self.output)
        for entry in self.entries:
            for place, number in entry.inputs or ():
                if place >= 0:
                    taken[place].add(number)
        return [tuple(sorted(numbers)) for numbers in taken]

    def plan(self, decided: Mapping[int, bool]) -> GraphPlan:
        """The plan for given decisions about the open places."""
        if self._plan is None or self._plan.decided != decided:
            self._plan = GraphPlan(self, decided)
        return self._plan


class GraphPlan:
    """The uses and open places of an outline, and data for backward passes.

    Attributes:
        uses: in the order of the walk.
        open: places that may or may not carry examples.
        taken_for_derived: places assumed to be computed from parameters alone, without proof.
        derived: places computed from parameters alone.
        is_coupled: whether no row of any tensor belongs to one example alone.
        paths: paths of all operands (examples.py) and the parameters that they lead to, if no path needs autograd.
    """

    paths: tuple[object, Any] | None = None

    def __init__(self, outline: Outline, decided: Mapping[int, bool]) -> None:
        self._outline, self.decided = outline, dict(decided)
        self.uses: list[UsePlan] = []
        self.open: list[int] = []
        self.taken_for_derived: list[int] = []
        derived: set[int] = set()
        for index, entry in enumerate(outline.entries):
            if entry.inputs is None:
                derived.add(index)
                continue
            inputs = [(j, place, number) for j, (place, number) in enumerate(entry.inputs) if place >= 0]
            operands = {j: (place, number) for j, place, number in inputs if place in derived}
            if not operands:  # only data, or a leaf that is not a parameter: an input that requires a gradient
                continue
            if len(operands) == len(inputs):
                if entry.name in CLOSED and len(inputs) == len(entry.inputs):
                    derived.add(index)
                    continue
                carries_data = decided.get(index)
                if carries_data is None:
                    self.open.append(index)
                if not carries_data:
                    self.taken_for_derived.append(index)
                    derived.add(index)
                    continue
            self.uses.append(UsePlan(index, operands, outline.outputs[index]))
        self.derived = frozenset(derived)
        self.is_coupled = len(outline.entries) - 1 in derived and not self.open

    @cached_property
    def routes(self) -> list[dict[int, Route]]:
        """The route of each operand of each use, those without autograd first."""
        every = [{j: self._route(*source) for j, source in use.operands.items()} for use in self.uses]
        return [dict(sorted(ways.items(), key=lambda item: not item[1].is_by_hand)) for ways in every]

    @cached_property
    def uses_of(self) -> Counter[str]:
        """The number of contributions to each parameter."""
        return Counter(name for ways in self.routes for way in ways.values() for name in way.parameters)

    @cached_property
    def at_once(self) -> frozenset[str]:
        """Parameters with gradients that need no autograd before the weighted sum."""
        waits = {
            name
            for ways in self.routes
            for way in ways.values()
            for name in way.parameters
            if not way.isometric or (self.uses_of[name] > 1 and not way.is_by_hand)
        }
        return frozenset(self.uses_of) - waits

    @cached_property
    def has_use_behind(self) -> list[bool]:
        """For each use, whether another use lies between it and the parameters."""
        used = {use.index for use in self.uses}
        above: set[int] = set()
        for index, entry in enumerate(self._outline.entries):
            if any(place in used or place in above for place, _ in entry.inputs or ()):
                above.add(index)
        return [use.index in above for use in self.uses]

    def _route(self, source: int, number: int) -> Route:
        entries = self._outline.entries
        places: list[int] = []
        place = source
        while (inputs := entries[place].inputs) is not None:
            entry = entries[place]
            if entry.name not in ISOMETRIC or len(inputs) != 1 or entry.cuts == CROSSES:
                return Route(source, number, self._parameters_behind(source), False, (), ())
            places.append(place)
            place = inputs[0][0]
        moves = (entries[i] for i in places if entries[i].name not in CASTS)
        steps = tuple(TRANSPOSE if entry.cuts == TRANSPOSE else entry.name for entry in moves)
        return Route(source, number, (entries[place].name,), True, tuple(places), steps)

    def _parameters_behind(self, source: int) -> tuple[str, ...]:
        behind: dict[str, None] = {}
        entered: set[int] = set()
        stack = [source]
        while stack:
            place = stack.pop()
            if place < 0 or place in entered:
                continue
            entered.add(place)
            entry = self._outline.entries[place]
            if entry.inputs is None:
                behind[entry.name] = None
            stack.extend(child for child, _ in entry.inputs or ())
        return tuple(behind)
