"""The methods for per-example gradients, by name. All give the same norms and sums at different cost.

`auto` uses book-keeping, the faster method, if memory allows (free_memory.py), and two passes that keep nothing
otherwise. It decides once per kind of graph, batch size and sizes at the two ends of the graph. A batch with probed
layouts already has its output gradients in memory and always uses book-keeping.

Two backward passes (`Reweighted`): the first computes norms, the second the weighted sum. Within a pass, each
parameter's gradients are measured, or weighted and summed, as soon as they are complete, and then freed (stream.py). So
peak memory is that of plain training plus the few per-example gradients written out at a time.

The published method differentiates sum_i nu_i loss_i in the second pass. That equals the clipped sum in exact
arithmetic only. Large terms may cancel exactly when every loss has weight 1, and leave nu * u * (their size) when it
has weight nu: rounding does not commute with a factor that is not a power of two, so the released gradient would differ
from the measured one. Here the second pass uses the same weight 1, and nu_i is applied when a parameter's gradients are
summed.

The second pass repeats the first bit by bit if the kernels are deterministic, which some GPU kernels are not. So it is
measured as well, and an example with a longer gradient than in the first pass is scaled back to the first norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from clipwise.gradients.examples import Contribution, Parameters, Path, PerExampleGradients, written_out
from clipwise.gradients.forms import Budget, Form, measured
from clipwise.gradients.forms.base import CHUNK_BYTES
from clipwise.gradients.plain import by_loop, by_vmap
from clipwise.gradients.precision import PutAside
from clipwise.gradients.stream import Memory, Stream, Take


class Reweighted(PerExampleGradients):
    """Gradients that are recomputed in each pass."""

    def __init__(self, stream: Stream, batch: int, memory: Memory) -> None:
        super().__init__(batch, {}, memory.arithmetic, memory.rare)
        self._stream = stream
        self._muted_B: Tensor | None = None
        self._squares: dict[str, Tensor] = {}
        self._errors: dict[str, Tensor] = {}

    def squared_norms(self) -> dict[str, Tensor]:
        self._pass(self._measure, retain=True)
        return dict(self._squares)

    def squared_errors(self) -> dict[str, Tensor]:
        return dict(self._errors)

    def mute(self, muted_B: Tensor) -> None:
        self._muted_B = muted_B

    def weighted_sums(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Guarantees |w_i g_i| <= w_i n_i for every parameter, with n_i the norm from the first pass."""
        if not self._squares:
            self.squared_norms()
        sums: dict[str, tuple[Path, Tensor]] = {}
        self._pass(partial(self._sum_up, sums, weights), retain=False)
        with torch.no_grad(), self._arithmetic.products():
            return {name: path.pull(sums.pop(name)[1]) for name, (path, _) in list(sums.items())}

    def instantiate(self, examples: slice) -> dict[str, Tensor]:
        return self._stream.gradients(retain=True).instantiate(examples)

    def _pass(self, take: Take, retain: bool) -> None:
        """A backward pass in which the host does not wait for the device at every gradient.

        Checks for rare events are deferred to the end. If one is positive, the pass is repeated.
        """
        asks_at_once = self._rare
        if not self._stream.is_on_cuda or isinstance(asks_at_once, PutAside):
            self._stream.each(take, retain)
            return
        self._rare = aside = PutAside()
        try:
            self._stream.each(take, retain=True)
        finally:
            self._rare = asks_at_once
        happened = aside.happened()
        if happened is not None and asks_at_once.any(happened):
            self._stream.each(take, retain)

    def _measure(self, found: dict[str, Contribution]) -> None:
        with self._arithmetic.products():
            for name, c in found.items():
                self._squares[name] = self._squared_norms(c.form)
                if c.form.squared_error_B is not None:
                    self._errors[name] = c.form.squared_error_B

    def _sum_up(
        self, sums: dict[str, tuple[Path, Tensor]], weights: Mapping[str, Tensor], found: dict[str, Contribution]
    ) -> None:
        with self._arithmetic.products():
            again = {name: self._squared_norms(c.form) for name, c in found.items()}
            bad_B = ~torch.isfinite(torch.stack(list(again.values())).sum(0))
            if self._muted_B is not None:
                bad_B |= self._muted_B.to(bad_B.device)
            if self._muted_B is not None or self._rare.any(bad_B):
                for c in found.values():
                    c.form.mute(bad_B)
            for name, c in found.items():
                w_B = weights[name] * _shorter(self._squares[name], again[name])
                if name in self._errors and c.form.squared_error_B is not None:
                    w_B = w_B * _shorter(self._errors[name], c.form.squared_error_B)
                sums[name] = c.path, c.form.weighted_sum(w_B)

    def _squared_norms(self, form: Form) -> Tensor:
        """Both passes bound norms in the same way, so that equal gradients give equal bounds."""
        return measured(form, Budget(CHUNK_BYTES, self._arithmetic), self._rare)


def _shorter(first_B: Tensor, again_B: Tensor) -> Tensor:
    """n_first / n_again where the second norm is larger, else 1."""
    return torch.where(again_B > first_B, first_B / again_B, 1.0).sqrt()


def by_choice(losses: Tensor, parameters: Parameters, memory: Memory) -> PerExampleGradients:
    """Book-keeping or reweighting, depending on free memory."""
    stream = Stream(losses, parameters, memory)
    found = stream.collected_if_possible()
    return Reweighted(stream, len(losses), memory) if found is None else found


def by_bookkeeping(losses: Tensor, parameters: Parameters, memory: Memory) -> PerExampleGradients:
    """One backward pass that keeps the output gradients for norms and sums (ghost clipping). Frees the graph."""
    return Stream(losses, parameters, memory).collected()


def by_reweighting(losses: Tensor, parameters: Parameters, memory: Memory) -> PerExampleGradients:
    """Norms from one backward pass and sums from another."""
    return Reweighted(Stream(losses, parameters, memory), len(losses), memory)


def by_instantiating(losses: Tensor, parameters: Parameters, memory: Memory) -> PerExampleGradients:
    """One backward pass that writes out B gradients per parameter, and recomputes those that memory cannot hold."""
    found = Stream(losses, parameters, memory).gradients()
    by_parameter = found.by_parameter.items()
    written = {name: written_out(name, parameters[name], c.form.dtype, [c]) for name, c in by_parameter}
    return PerExampleGradients(found.batch, written)


_FROM_THE_GRAPH = {
    "auto": by_choice,
    "bookkeeping": by_bookkeeping,
    "reweight": by_reweighting,
    "instantiate": by_instantiating,
}
_BY_AUTOGRAD = {"vmap": by_vmap, "loop": by_loop}

METHODS = (*_FROM_THE_GRAPH, *_BY_AUTOGRAD)


def per_example_gradients(
    losses: Tensor, parameters: Parameters, memory: Memory, method: str = "auto"
) -> PerExampleGradients:
    """The gradient of each loss. `losses` is a vector with one loss per example; its graph may be freed."""
    if len(losses) == 1:
        return by_loop(losses, parameters)  # one plain gradient; no layout is needed
    if method in _FROM_THE_GRAPH:
        return _FROM_THE_GRAPH[method](losses, parameters, memory)
    found = _BY_AUTOGRAD[method](losses, parameters)
    written = found.instantiate(slice(0, found.batch)).values()
    all_finite = all(bool(torch.isfinite(g).all()) for g in written)
    return found if all_finite else by_bookkeeping(losses, parameters, memory)
