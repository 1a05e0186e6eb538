"""Freezing of converged entries, which then get no gradient and no noise."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clipwise.clipping.base import Bound, Parameters, Site
from clipwise.clipping.contrib.decay import Every, period_of, require_every
from clipwise.clipping.thresholds import Constants, ScaledConstants
from clipwise.errors import ConfigurationError
from clipwise.gradients import PerExampleGradients, Written
from clipwise.gradients.examples import Contribution, Path
from clipwise.gradients.forms import at_least_float32
from clipwise.validation.arguments import number, whole, with_plain_numbers

_LEAST_WINDOW = 10  # releases; fewer do not show a drift


@dataclass(frozen=True)
class Sparse:
    """Freeze the entries that have converged: option `sparse` of `PerExample` and of `Batch`.

    An entry has converged if its releases g_t are indistinguishable from noise. With s_t the noise on each entry of
    g_t, pure noise gives z_t = g_t / s_t with mean 0 and variance 1. At the end of a window of T releases an entry is
    frozen if both sums are within a standard deviations of these values:

        |sum_t z_t| <= a sqrt(T),    sum_t z_t^2 <= T + a sqrt(2 T)

    (no drift, and no oscillation larger than the noise). It is then set to its average over the window, and stays
    constant. Its gradient is set to 0 before the norm is computed, and `.grad` is exactly 0. Frozen entries stay
    frozen, since nothing more is released about them. With d_k' of d_k entries active, the clipping norm of part k is

        C_k' = C_k sqrt(max(d_k', 1) / d_k)

    so that the noise on an entry shrinks with the clipped vector.

    A slowly moving entry with mean gradient below a s / sqrt(T) looks converged: use long windows, and start late.
    Frozen entries stay constant, whatever momentum or weight decay the optimizer uses. A checkpoint holds them and the
    current window: up to 16 bytes per entry of the model.

    Args:
        every: T, the length of a window: "epoch", or a number of steps, at least 10.
        within: a, the tolerance in standard deviations.
        after: the number of releases before the first window.

    Guarantee:
        - That of the strategy with clipping norms C_k' on the active entries; the others contribute exactly 0.
        - The set of active entries depends on releases, noise levels and settings, and is fixed before the step
          (post-processing).
        - Assumption: only releases change the weights, as for any run.
    """

    every: Every = "epoch"
    within: float = 1.0
    after: int = 0

    def __post_init__(self) -> None:
        with_plain_numbers(self)
        require_every(self.every, "Sparse", never=False)
        number("Sparse: within", self.within, above=0)
        whole("Sparse: after", self.after)

    def describe(self) -> dict[str, Any]:
        return {"every": self.every, "within": float(self.within), "after": self.after}


def without(vectors: Mapping[str, Tensor], frozen: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Set frozen entries to 0, even if they are not finite."""
    return {name: v.masked_fill(frozen[name], 0) if name in frozen else v for name, v in vectors.items()}


def active_only(
    gradients: PerExampleGradients, frozen: Mapping[str, Tensor], parameters: Parameters
) -> PerExampleGradients:
    """Materialized per-example gradients with frozen entries set to 0."""

    def masked(name: str, c: Contribution) -> Contribution:
        def make(examples: slice) -> Tensor:
            return c.path.pull_each(c.form.instantiate(examples), name).masked_fill(frozen[name], 0)

        p = parameters[name]
        return Contribution(Written(c.form.batch, p.shape, c.form.dtype, make), Path.identity(name, p))

    return PerExampleGradients(
        gradients.batch, {name: masked(name, c) if name in frozen else c for name, c in gradients.by_parameter.items()}
    )


class Thinned(ScaledConstants):
    """Other constants with norms that shrink as entries are frozen."""

    lasts = 1  # a captured step does not compare the frozen entries

    def __init__(self, sparse: Sparse, inner: Constants, site: Site) -> None:
        if inner.bounds:
            raise ConfigurationError(
                "sparse=Sparse(...) is not supported with max_norm=Quantile(...): pass a number or a NormDecay."
            )
        super().__init__(inner)
        self._within, self._parameters = float(sparse.within), site.parameters
        self._period = period_of(sparse.every, site) or 1
        if self._period < _LEAST_WINDOW:
            raise ConfigurationError(
                f"Sparse: every={sparse.every!r} is a window of {self._period} releases, which is too short to detect "
                f"a drift: use every={_LEAST_WINDOW} or more, preferably hundreds."
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
        """Update the inner constants; at the end of a window, freeze entries."""
        changed = self._inner.learn(means, noise)
        if self._wait > 0:
            self._wait -= 1
            return changed and self._take_over()
        self._window.observe(means, noise or {})
        if self._window.length == self._period:
            changed = self._freeze(self._window) or changed
            self._window = _Window(self._parameters)
        return changed and self._take_over()

    def _freeze(self, window: _Window) -> bool:
        """Freeze converged entries at their averages. Returns whether any were frozen."""
        before = dict(self._active)
        for name, p in self._parameters.items():
            old = self.frozen.get(name, torch.zeros_like(p, dtype=torch.bool))
            frozen = old | window.has_converged(name, self._within)
            self._active[name] = p.numel() - int(frozen.sum())
            if self._active[name] < before[name]:
                self._held[name] = torch.where(old, self._held.get(name, p.detach()), window.averages[name].to(p.dtype))
                self.frozen[name] = frozen
        return self._active != before

    def factor(self, names: Sequence[str]) -> float:
        """sqrt(max(d', 1) / d). A part without active entries keeps the norm of one entry, so that it has noise."""
        active = sum(self._active[n] for n in names)
        return math.sqrt(max(active, 1) / max(sum(self._parameters[n].numel() for n in names), 1))

    @torch.no_grad()
    def settle(self) -> None:
        for name, frozen in self.frozen.items():
            p = self._parameters[name]
            p.copy_(torch.where(frozen, self._held[name], p))

    def state_dict(self) -> dict[str, Any]:
        masks = {name: _packed(mask) for name, mask in self.frozen.items()}
        held = {name: _written(value) for name, value in self._held.items()}
        frozen = {"entries": masks, "held": held, "wait": self._wait, "window": self._window.state_dict()}
        return {**self._inner.state_dict(), "frozen": frozen}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        saved = state["frozen"]
        wait = int(saved["wait"])
        masks = {name: _unpacked(text, self._parameters[name]) for name, text in saved["entries"].items()}
        held = {name: _read(saved["held"][name], self._parameters[name]) for name in masks}
        window = _Window(self._parameters, saved["window"])
        self._inner.load_state_dict(state)
        self._wait, self.frozen, self._held, self._window = wait, masks, held, window
        self._active = {name: p.numel() for name, p in self._parameters.items()}
        self._active |= {name: mask.numel() - int(mask.sum()) for name, mask in masks.items()}
        return self._take_over()


class _Window:
    """Sums per entry over the releases of the current window, in float32 or better."""

    def __init__(self, parameters: Parameters, state: Mapping[str, Any] | None = None) -> None:
        self._parameters = parameters
        self.length = 0 if state is None else int(state["length"])
        self._sums: dict[str, Tensor] = {}  # of z
        self._squares: dict[str, Tensor] = {}  # of z^2
        self.averages: dict[str, Tensor] = {}  # of the weights at which the releases were computed
        self._kinds = {"sums": self._sums, "squares": self._squares, "averages": self.averages}
        if state is not None and self.length:
            for kind, found in self._kinds.items():
                found.update((n, _read(state[kind][n], at_least_float32(p))) for n, p in parameters.items())

    def state_dict(self) -> dict[str, Any]:
        """The sums in JSON types. They follow from releases."""
        kinds = {kind: {name: _written(t) for name, t in found.items()} for kind, found in self._kinds.items()}
        return {"length": self.length, **kinds}

    def observe(self, means: Mapping[str, Tensor], noise: Mapping[str, float]) -> None:
        """Add a release, at the weights before its update. Ignored without noise."""
        if any(noise[name] == 0 for name in self._parameters):
            return
        self.length += 1
        for name, p in self._parameters.items():
            w = at_least_float32(p.detach())
            z = means[name].to(w.dtype) / noise[name]  # sums of several microbatches are float64
            if self.length == 1:
                self._sums[name], self._squares[name], self.averages[name] = z, z.square(), w.clone()
            else:
                self._sums[name] += z
                self._squares[name].addcmul_(z, z)
                self.averages[name].lerp_(w, 1 / self.length)

    def has_converged(self, name: str, within: float) -> Tensor:
        """Entries with releases indistinguishable from noise; False where not finite."""
        T = self.length
        has_no_drift = self._sums[name].abs() <= within * math.sqrt(T)
        return has_no_drift & (self._squares[name] <= T + within * math.sqrt(2 * T))


def _packed(mask: Tensor) -> str:
    """One bit per entry, as text: for JSON and `weights_only=True`."""
    return base64.b64encode(np.packbits(mask.cpu().numpy().reshape(-1)).tobytes()).decode()


def _unpacked(text: str, like: Tensor) -> Tensor:
    packed = np.frombuffer(_bytes(text, -(-like.numel() // 8)), dtype=np.uint8)
    bits = np.unpackbits(packed, count=like.numel()).astype(bool)
    return torch.from_numpy(bits).view(like.shape).to(like.device)


def _written(value: Tensor) -> str:
    """Every bit of a tensor, as text."""
    content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return base64.b64encode(content).decode()


def _read(text: str, like: Tensor) -> Tensor:
    """The inverse of `_written`, for the shape and dtype of `like`."""
    content = bytearray(_bytes(text, like.numel() * like.element_size()))
    if not content:
        return torch.empty_like(like)
    return torch.frombuffer(content, dtype=like.dtype).view(like.shape).to(like.device)


def _bytes(text: str, length: int) -> bytes:
    content = base64.b64decode(text, validate=True)  # binascii.Error is a ValueError
    if len(content) != length:
        raise ValueError("of another shape")
    return content
