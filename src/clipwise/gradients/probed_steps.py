"""Warns once if most steps are probed: extra backward passes make a step several times slower."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from clipwise.errors import warn
from clipwise.gradients.outline import Outline
from clipwise.gradients.walk import Graph, node_name
from clipwise.kernels.tracing import is_tracing

_STEPS = 64  # the first steps of a run are probed in any case, and the first ones of each batch size may be
_AGREEING_BATCHES = 2

_CHANGES = (
    "The operations of the forward pass change from batch to batch, for example with a loop over the lengths of the "
    "sequences or over the experts in use. Run the same operations on every batch: pad the sequences to one length, "
    "and call every expert."
)
_UNCLEAR = (
    "At {operation}{place}, the data decide which row belongs to which example, and the indices alone do not show it; "
    "or no gradient has arrived yet. {advice}"
)
_IN_PLACE = "Compute the part out of place, for example by torch.cat or torch.where, instead of writing into a tensor."
_BY_INDEX = (
    "Select and write rows by index (h[index], gather, index_add, masked_scatter), or pad them. Freeze parameters that "
    "get no gradient."
)


class ProbedWarning(UserWarning):
    """Most steps need extra backward passes to find out which rows belong to which example."""


@dataclass
class Probing:
    """Where the layout could not be read, and for each of the last steps whether it was probed.

    In `recent` a step counts as "new" if it was probed because few graphs had its outline.
    """

    unread: int | None = None
    recent: deque[bool | Literal["new"]] = field(default_factory=lambda: deque(maxlen=_STEPS))
    _seen: Counter[Outline] = field(default_factory=Counter)
    _is_reported: bool = False

    def note(self, graph: Graph) -> None:
        """Record a step that is probed."""
        if self._is_reported or is_tracing():
            return
        self._seen[graph.outline] += 1
        self.recent.append("new" if self._seen[graph.outline] <= _AGREEING_BATCHES else True)
        if len(self.recent) < _STEPS or 2 * sum(map(bool, self.recent)) <= _STEPS:
            return
        self._is_reported = True
        self._seen.clear()
        warn(
            "Most steps of this model take extra backward passes, which find out which rows belong to which example. "
            f"They are exact, but several times slower than ordinary training. {self._reason(graph)}",
            ProbedWarning,
        )

    def _reason(self, graph: Graph) -> str:
        index = next(iter(graph.outline.movers[-1:]), None) if self.unread is None else self.unread
        if index is None or 2 * self.recent.count("new") > _STEPS:
            return _CHANGES
        name = node_name(graph.order[index])
        advice = _IN_PLACE if "CopySlices" in name or "AsStrided" in name else _BY_INDEX
        layer = _layer_behind(graph, [index])
        place = f" behind layer {layer!r}" if layer else ""
        return _UNCLEAR.format(operation=name.rpartition("::")[2], place=place, advice=advice)


def _layer_behind(graph: Graph, indices: Iterable[int]) -> str:
    """The module of the parameter that is the fewest operations away."""
    entries, seen, near = graph.outline.entries, set(indices), deque(indices)
    while near:
        entry = entries[near.popleft()]
        if entry.inputs is None:
            return entry.name.rpartition(".")[0]
        for place, _ in entry.inputs:
            if place >= 0 and place not in seen:
                seen.add(place)
                near.append(place)
    return ""
