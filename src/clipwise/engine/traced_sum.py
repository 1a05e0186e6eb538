"""The bounded sum of a piece of a batch as one traced graph, and steps that use it.

The graph holds forward, backward, norms, weights and weighted sums (tracing.py). It is a graph for one size: smaller
pieces are padded with rows of weight 0, larger ones are cut. Before it is used, its sums are compared with those of
eager steps on batches other than the one it was traced for. A rare case (gradients/precision.py) is found by a flag
that the graph returns: then the piece is gathered again eagerly, before anything is charged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clipwise.engine import inductor, pinned, step
from clipwise.engine.captured import bounds_of, state_of
from clipwise.engine.context import StepContext
from clipwise.engine.pieces import FixedRows, clipped_rows, padded_rows, pieces_of
from clipwise.engine.tracing import trace
from clipwise.gradients.precision import without_autocast
from clipwise.sampling import generators
from clipwise.sampling.batch_structure import map_tensors, tensors_in

if TYPE_CHECKING:
    from clipwise.sampling.loader import Piece

Loss = Callable[..., Tensor]
Sums = dict[str, Tensor]

_PASSES_BEFORE = 3  # eager ones, before the trace
_AGREEING = 2  # pieces
_MOST_TRIES = 8  # with rare cases, which compare nothing
# The two sums differ by rounding alone. A constant or a row taken for another makes them differ as a whole.
_IN_FLOAT64, _IN_FLOAT32, _IN_TF32, _IN_HALF = 1e-8, 1e-3, 2.0**-6, 2.0**-4
_FLOOR = 0.05  # the share of the whole sum that counts as a parameter's own, which may be pure rounding error


class TracedSum:
    """The bounded sum over the rows in `rows`.

    Attributes:
        rows: the fixed memory of the inputs.
        bounds: the noise and the clips at the trace.
        is_trusted: whether enough pieces agreed with eager steps.
        is_random: whether the graph draws random numbers.
        slower: the time of the graph over that of an eager sum, in the last comparison.
    """

    def __init__(
        self, context: StepContext, loss: Loss, size: int, batch: Sequence[Any], run_by_torch: bool = False
    ) -> None:
        """`run_by_torch`: run the traced operations one by one instead of compiling them."""
        self._context, self._loss = context, loss
        self._device = next(iter(context.parameters.values())).device
        self._is_coupled = context.strategy.is_coupled
        self.rows = FixedRows(batch, size, context.views, self._device)
        self._inputs = [*tensors_in(self.rows.batch), self.rows.real_B]
        self._assumed = self._assumes()
        self._names: list[str] = []
        for _ in range(_PASSES_BEFORE):  # layouts and rules are checked and stored for this kind of graph
            clipped_rows(context, loss, self.rows.batch, size)
        context.guard.before_step()  # checks the passes above
        traced = trace(self._flat, self._inputs, context.model)
        self.is_random, self.bounds = traced.is_random, bounds_of(context)
        self._tolerance = self._tolerance_of(traced.is_coarse)
        self._lifted = [t.detach() for t in traced.lifted]
        self._run: inductor.CompiledRun = traced.graph if run_by_torch else inductor.compiled(traced, self._inputs)
        self._agreed = self._tried = 0
        self.slower = 0.0

    def _flat(self, *inputs: Tensor) -> list[Tensor]:
        """The traced function: rows and `real_B` to sums and the flag."""
        given = iter(inputs)
        batch = map_tensors(lambda _: next(given), self.rows.batch)
        sums, rare = padded_rows(self._context, self._loss, batch, inputs[-1])
        self._names = list(sums)
        rare = torch.zeros((), dtype=torch.bool, device=self._device) if rare is None else rare
        return [*sums.values(), rare]

    def _assumes(self) -> object:
        """What the graph assumes constant."""
        return state_of(self._context.model), pinned.settings()

    @property
    def is_current(self) -> bool:
        """Whether what the graph assumes constant is unchanged."""
        return self._assumes() == self._assumed

    @property
    def is_trusted(self) -> bool:
        return self._agreed >= _AGREEING

    def takes(self, rows: Sequence[Any], count: int) -> bool:
        """Whether the graph has the shapes for these rows."""
        return self.rows.matches(rows) and (count == self.rows.size if self._is_coupled else count <= self.rows.size)

    def run(self) -> tuple[Sums, Tensor]:
        """The bounded sum over the rows in memory, and whether a rare case happened, on the device."""
        with torch.no_grad(), without_autocast():
            *sums, rare = self._run(*self._inputs, *self._lifted)
        return dict(zip(self._names, sums, strict=True)), rare

    def of(self, rows: Sequence[Any], count: int) -> Sums:
        """The bounded sum of these rows; computed eagerly after a rare case, or if the graph has other shapes."""
        if self.takes(rows, count):
            self.rows.fill(rows, count)
            sums, rare = self.run()
            if not bool(rare):
                return sums
        found = clipped_rows(self._context, self._loss, rows, count)
        self._context.guard.before_step()  # checks the pass above
        return found

    def cut(self, batch: Sequence[Any], count: int) -> Iterator[tuple[Sequence[Any], int]]:
        """A piece in parts of at most the size of the graph. A microbatch is not cut."""
        size = max(count, self.rows.size) if self._is_coupled else self.rows.size
        return pieces_of(batch, count, size, self._context.views)

    def compare(self, batch: Sequence[Any], count: int) -> str | None:
        """Compare with eager sums on a piece that is drawn and not used yet. Returns what is wrong, or None."""
        for rows, length in self.cut(batch, count):
            if not self.takes(rows, length) or self.is_trusted:
                continue
            self._tried += 1
            self.rows.fill(rows, length)
            with self._same_random_numbers():
                self.run()  # the first run may compile kernels
            with self._same_random_numbers():
                begin = time.perf_counter()
                ours, rare = self.run()
                is_rare = bool(rare)  # waits for the device
                taken = time.perf_counter() - begin
            if is_rare:
                if self._tried >= _MOST_TRIES:
                    return "rare cases happen in most batches"
                continue
            with self._same_random_numbers():
                begin = time.perf_counter()
                eager = self._eager(rows, length)
                self.slower = taken / (time.perf_counter() - begin)
            if not _are_close(ours, eager, self._tolerance):
                return "its sums differ from those of an eager step"
            self._agreed += 1
        return None

    def _eager(self, rows: Sequence[Any], count: int) -> Sums:
        if self.is_random:  # the padding draws random numbers as well
            return padded_rows(self._context, self._loss, self.rows.batch, self.rows.real_B)[0]
        return clipped_rows(self._context, self._loss, rows, count)

    @contextmanager
    def _same_random_numbers(self) -> Iterator[None]:
        places = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(places):
            yield

    def drawing(self, piece: Piece) -> Any:
        """A block in which random layers draw from the key of the run, as in `private.randomness()`."""
        if not self.is_random:
            return nullcontext()
        secret = self._context.keys.key.derive(f"randomness/{piece.number}")
        return generators.drawing_from(secret, {self._device})

    def _tolerance_of(self, is_coarse: bool) -> float:
        if is_coarse:
            return _IN_HALF
        if all(p.dtype == torch.float64 for p in self._context.parameters.values()):
            return _IN_FLOAT64
        is_exact = self._device.type == "cpu" or pinned.settings() == ("highest", False)
        return _IN_FLOAT32 if is_exact else _IN_TF32


class TracedStep:
    """A step whose bounded sums come from a traced graph. Everything else is as in an eager step."""

    def __init__(self, context: StepContext, traced: TracedSum) -> None:
        self._context, self._sum, self.bounds = context, traced, traced.bounds

    def step(self, batch: Sequence[Any], piece: Piece) -> bool:
        """Gather a piece; after the last piece of a batch, release and update."""
        context = self._context
        step.begin(context, piece)
        total = context.clipper.nothing() if piece.size == 0 else {}
        for rows, count in self._sum.cut(batch, piece.size):
            for name, found in self._sum.of(rows, count).items():
                total[name] = total[name].add_(found) if name in total else found
        return step.update(context, step.gather(context, piece, total))


def _are_close(ours: Mapping[str, Tensor], eager: Mapping[str, Tensor], tolerance: float) -> bool:
    """Whether two sums differ by rounding alone."""
    norms = {name: torch.linalg.vector_norm(t.double()) for name, t in eager.items()}
    floor = _FLOOR * torch.stack(list(norms.values())).norm()
    errors = {name: torch.linalg.vector_norm(t.double() - ours[name].double()) for name, t in eager.items()}
    close = [errors[name] <= tolerance * (norm + floor) for name, norm in norms.items()]
    return bool(torch.stack(close).all())
