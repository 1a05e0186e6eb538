"""Two backward passes: the first computes norms, the second the weighted sum. No gradient is kept in between.

Within a pass, each parameter's gradients are measured, or weighted and summed, as soon as they are complete, and then
freed (stream.py). So peak memory is that of plain training plus the few per-example gradients written out at a time.

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

from clipwise.gradients.examples import Contribution, Path, PerExampleGradients
from clipwise.gradients.forms import Budget, Form, measured
from clipwise.gradients.forms.base import CHUNK_BYTES
from clipwise.gradients.rare import PutAside
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
