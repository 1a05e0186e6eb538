"""`auto`: book-keeping where there is memory for it, otherwise two passes that keep nothing.

Book-keeping is the faster one, and keeps more than plain training does: the output gradients of all uses, whose
sizes the graph tells, and some per-example gradients (examples.py). With the sums, and with room for what an
optimizer may set up after the first step (two numbers a parameter, as Adam does), that must fit into four fifths
of what is free on the device after the forward pass. It is decided once for each kind of graph, size of batch, and
sizes at the graph's two ends. A batch whose layouts were probed has its output gradients in memory by then, and is
always done by book-keeping. All methods give the same norms and sums: the choice changes rounding alone.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from clipwise.gradients import free_memory
from clipwise.gradients.bookkeeping import Memory
from clipwise.gradients.examples import Parameters, PerExampleGradients, keep_bytes
from clipwise.gradients.reweight import Reweighted
from clipwise.gradients.stream import Stream

_SHARE = 0.8  # of free memory: what lies between its pieces is of no use
_OPTIMIZER = 2  # numbers that it keeps for each parameter
_MOST_KINDS = 512


def by_choice(losses: Tensor, parameters: Parameters, memory: Memory) -> PerExampleGradients:
    """Book-keeping or reweighting, by the memory that there is."""
    stream = Stream(losses, parameters, memory)
    if stream.is_probed or _fits(stream, parameters, memory, len(losses)):
        return stream.collected()
    return Reweighted(stream, len(losses), memory)


def _fits(stream: Stream, parameters: Parameters, memory: Memory, batch: int) -> bool:
    kind = (stream.kind, batch)
    if kind not in memory.fits:
        if len(memory.fits) >= _MOST_KINDS:
            memory.fits.clear()
        wanted = wanted_bytes(stream.output_bytes(), parameters, batch)
        memory.fits[kind] = all(_is_free(device, size) for device, size in wanted.items())
    return memory.fits[kind]


def wanted_bytes(
    output_bytes: Counter[torch.device], parameters: Parameters, batch: int
) -> Counter[torch.device]:
    """What book-keeping allocates from the end of the forward pass on, by device; an upper estimate."""
    wanted = Counter(output_bytes)
    weights: Counter[torch.device] = Counter()
    for p in parameters.values():
        weights[p.device] += p.numel() * p.element_size()
    for device, size in weights.items():
        wanted[device] += (1 + _OPTIMIZER) * size + min(keep_bytes({device}), batch * size)
    return wanted


def _is_free(device: torch.device, size: int) -> bool:
    free = free_memory.free_bytes(device)
    return free is None or size <= _SHARE * free
