"""Entries of parameters that only hover within the noise are frozen: they leave the clipped vector and the noise."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clipwise.clipping.base import Bound, Parameters, Site, damaged
from clipwise.clipping.contrib.decay import Every, period_of, require_every
from clipwise.clipping.thresholds import Constants, ScaledConstants
from clipwise.errors import ConfigurationError, StepError
from clipwise.gradients import PerExampleGradients, Written
from clipwise.gradients.forms import at_least_float32
from clipwise.gradients.paths import Contribution, Path
from clipwise.validation.arguments import number, with_plain_numbers

_LEAST_WINDOW = 10  # releases; fewer say nothing about where a weight is going


@dataclass(frozen=True)
class Sparse:
    """Freeze the entries that have converged: option `sparse` of `PerExample` and of `Batch`.

    A weight has converged if it moves about its average as noise alone would move it. The releases g_t show this
    for any optimizer and learning rate, for they are what it is moved by. With s_t the noise on each entry of g_t,
    noise alone gives z_t = g_t / s_t of mean 0 and variance 1. At the end of a window of T releases an entry is
    frozen if both sums are within a standard deviations of that:

        |sum_t z_t| <= a sqrt(T),    sum_t z_t^2 <= T + a sqrt(2 T)

    (no drift, and no swings larger than the noise). It is then set to the average of its values in the window, and
    stays there. Its gradient counts 0 before the norm is taken, and `.grad` is exactly 0. Frozen entries do not thaw:
    nothing is released about them any more. With d_k' of d_k entries left, the bound of part k is

        C_k' = C_k sqrt(max(d_k', 1) / d_k)

    so that the noise on an entry shrinks with the clipped vector.

    An entry that moves slowly looks as if it had converged, if its mean gradient is below a s / sqrt(T): use long
    windows, and begin late. `private.step` keeps frozen entries where they are, whatever momentum or weight decay the
    optimizer has. After `private.backward` and an update of your own they are put back when the next batch is handed
    out. A checkpoint holds the frozen entries and the window so far: up to 16 bytes an entry of the model.

    Args:
        every: T, the length of a window: "epoch", or a number of steps, at least 10.
        within: a, how many standard deviations still count as noise.
        after: how many releases go by before the first window begins.

    Guarantee:
        That of the strategy with the bounds C_k', on the entries that are left: the clip is on those alone, and the
        others add exactly 0. Which are left follows from releases, from the noise's size and from settings, and is
        fixed before the step: post-processing, at no cost. Assumption: weights are moved by releases alone, as the
        guarantee of any run assumes.
    """

    every: Every = "epoch"
    within: float = 1.0
    after: int = 0

    def __post_init__(self) -> None:
        with_plain_numbers(self)
        require_every(self.every, "Sparse", never=False)
        number("Sparse: within", self.within, above=0)
        if isinstance(self.after, bool) or not isinstance(self.after, int) or self.after < 0:
            raise ConfigurationError(
                f"Sparse: after must be a number of releases, 0 or more, not {self.after!r}."
            )

    def describe(self) -> dict[str, Any]:
        return {"every": self.every, "within": float(self.within), "after": self.after}


def without(vectors: Mapping[str, Tensor], frozen: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Vectors by parameter with 0 in all frozen entries, even where something else is not finite."""
    return {name: v.masked_fill(frozen[name], 0) if name in frozen else v for name, v in vectors.items()}


def active_only(
    gradients: PerExampleGradients, frozen: Mapping[str, Tensor], parameters: Parameters
) -> PerExampleGradients:
    """Per-example gradients with 0 in all frozen entries. They are written out: a mask has no Gram norm."""

    def masked(name: str, c: Contribution) -> Contribution:
        def make(examples: slice) -> Tensor:
            return c.path.pull_each(c.form.instantiate(examples))[name].masked_fill(frozen[name], 0)

        p = parameters[name]
        return Contribution(Written(c.form.batch, p.shape, c.form.dtype, make), Path.identity(name, p))

    return PerExampleGradients(
        gradients.batch,
        {name: masked(name, c) if name in frozen else c for name, c in gradients.by_parameter.items()},
    )


class Thinned(ScaledConstants):
    """Other constants, whose norms shrink as entries are frozen."""

    lasts = 1  # which entries are frozen is not among what a captured step compares

    def __init__(self, sparse: Sparse, inner: Constants, site: Site) -> None:
        if inner.bounds:
            raise ConfigurationError(
                "sparse=Sparse(...) does not go with max_norm=Quantile(...), which moves the bound by itself: give a "
                "number or a Decay."
            )
        super().__init__(inner)
        self._within, self._parameters = float(sparse.within), site.parameters
        self._period = period_of(sparse.every, site) or 1
        if self._period < _LEAST_WINDOW:
            raise ConfigurationError(
                f"Sparse: every={sparse.every!r} is a window of {self._period} releases, which say nothing about where "
                f"a weight is going: give every={_LEAST_WINDOW} or more, better hundreds."
            )
        self._wait = sparse.after
        self._active = {name: p.numel() for name, p in site.parameters.items()}
        self._held: dict[str, Tensor] = {}
        self._window = _Window(site.parameters)

    def bounds_with(self, factor: float) -> tuple[Bound, ...]:
        bounds = super().bounds_with(factor)
        return tuple(replace(b, size=sum(self._active[n] for n in b.parameters)) for b in bounds)

    @torch.no_grad()
    def learn(self, means: Mapping[str, Tensor], noise: Mapping[str, float] | None = None) -> bool:
        """The inner constants first; at the end of a window, freeze."""
        changed = self._inner.learn(means, noise)
        if self._wait > 0:
            self._wait -= 1
            return changed and self._take_over()
        self._window.hear(means, noise or {})
        if self._window.length == self._period:
            changed = self._freeze(self._window) or changed
            self._window = _Window(self._parameters)
        return changed and self._take_over()

    def _freeze(self, window: _Window) -> bool:
        """Take over what hovers, at its average. Returns whether anything was frozen."""
        before = dict(self._active)
        for name, p in self._parameters.items():
            old = self.frozen.get(name, torch.zeros_like(p, dtype=torch.bool))
            frozen = old | window.hovers(name, self._within)
            self._active[name] = p.numel() - int(frozen.sum())
            if self._active[name] < before[name]:
                self._held[name] = torch.where(
                    old, self._held.get(name, p.detach()), window.average(name).to(p.dtype)
                )
                self.frozen[name] = frozen
        return self._active != before

    def factor(self, names: Sequence[str]) -> float:
        """sqrt(max(d', 1) / d). A part with nothing left keeps the bound of one entry: no part is without noise."""
        active = sum(self._active[n] for n in names)
        return math.sqrt(max(active, 1) / max(sum(self._parameters[n].numel() for n in names), 1))

    @torch.no_grad()
    def settle(self) -> None:
        """Put frozen entries back."""
        for name, frozen in self.frozen.items():
            p = self._parameters[name]
            p.copy_(torch.where(frozen, self._held[name], p))

    def state_dict(self) -> dict[str, Any]:
        masks = {name: _packed(mask) for name, mask in self.frozen.items()}
        held = {name: _written(value) for name, value in self._held.items()}
        frozen = {"entries": masks, "held": held, "wait": self._wait, "window": self._window.state_dict()}
        return {**self._inner.state_dict(), "frozen": frozen}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        try:
            saved = state["frozen"]
            wait = int(saved["wait"])
            masks = {name: _unpacked(text, self._parameters[name]) for name, text in saved["entries"].items()}
            held = {name: _read(saved["held"][name], self._parameters[name]) for name in masks}
            window = _Window(self._parameters, saved["window"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise damaged("it does not say which entries are frozen") from error
        self._inner.load_state_dict(state)
        self._wait, self.frozen, self._held, self._window = wait, masks, held, window
        self._active = {
            name: p.numel() - (int(masks[name].sum()) if name in masks else 0)
            for name, p in self._parameters.items()
        }
        return self._take_over()


class _Window:
    """Sums over the releases since the last decision, entry by entry, in float32 or better."""

    def __init__(self, parameters: Parameters, state: Mapping[str, Any] | None = None) -> None:
        self._parameters = parameters
        self.length = 0 if state is None else int(state["length"])
        self._sums: dict[str, Tensor] = {}  # of z
        self._squares: dict[str, Tensor] = {}  # of z^2
        self._averages: dict[str, Tensor] = {}  # of the weights at which the releases were computed
        if state is not None and self.length:
            for kind, found in self._kinds().items():
                found.update((n, _read(state[kind][n], at_least_float32(p))) for n, p in parameters.items())

    def state_dict(self) -> dict[str, Any]:
        """All of it, in plain types: it follows from releases."""
        return {"length": self.length} | {
            kind: {name: _written(value) for name, value in found.items()}
            for kind, found in self._kinds().items()
        }

    def _kinds(self) -> dict[str, dict[str, Tensor]]:
        return {"sums": self._sums, "squares": self._squares, "averages": self._averages}

    def hear(self, means: Mapping[str, Tensor], noise: Mapping[str, float]) -> None:
        """One release, at weights that have not yet taken it in. Without noise nothing hovers within it."""
        if any(name not in noise for name in self._parameters):
            raise StepError(
                "Sparse(...) needs to know the noise of each release: the strategy does not tell it."
            )
        if any(noise[name] == 0 for name in self._parameters):
            return
        self.length += 1
        for name, p in self._parameters.items():
            w = at_least_float32(p.detach())
            z = means[name].to(w.dtype) / noise[name]  # sums of several mini-sets come in float64
            if self.length == 1:
                self._sums[name], self._squares[name], self._averages[name] = z, z.square(), w.clone()
            else:
                self._sums[name] += z
                self._squares[name].addcmul_(z, z)
                self._averages[name].lerp_(w, 1 / self.length)

    def hovers(self, name: str, within: float) -> Tensor:
        """Which entries moved as noise alone would. What is not finite does not."""
        T = self.length
        is_nowhere = self._sums[name].abs() <= within * math.sqrt(T)
        return is_nowhere & (self._squares[name] <= T + within * math.sqrt(2 * T))

    def average(self, name: str) -> Tensor:
        return self._averages[name]


def _packed(mask: Tensor) -> str:
    """A bit an entry, as text: for JSON and `weights_only=True`."""
    return _text(np.packbits(mask.cpu().numpy().reshape(-1)).tobytes())


def _unpacked(text: str, like: Tensor) -> Tensor:
    packed = np.frombuffer(_bytes(text, -(-like.numel() // 8)), dtype=np.uint8)
    bits = np.unpackbits(packed, count=like.numel()).astype(bool)
    return torch.from_numpy(bits).view(like.shape).to(like.device)


def _written(value: Tensor) -> str:
    """Every bit of a tensor, as text."""
    return _text(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def _read(text: str, like: Tensor) -> Tensor:
    """What was written of a tensor of this shape and type."""
    content = bytearray(_bytes(text, like.numel() * like.element_size()))
    if not content:
        return torch.empty_like(like)
    return torch.frombuffer(content, dtype=like.dtype).view(like.shape).to(like.device)


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _bytes(text: str, length: int) -> bytes:
    try:
        content = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError("no base64") from error
    if len(content) != length:
        raise ValueError("of another shape")
    return content
