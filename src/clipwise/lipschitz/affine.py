"""Bounds of linear layers, convolutions and embeddings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from clipwise.lipschitz.convolution import as_matrices, operator_from, operator_terms, windows_of
from clipwise.lipschitz.measuring import Frobenius, Length, LongestRow, Spectral, Vector, Wanted
from clipwise.lipschitz.norms import frobenius_norms
from clipwise.lipschitz.reach import Reach
from clipwise.lipschitz.rule import Effort, Measurements, Norms, Rounding, Rule

_EPS = torch.finfo(torch.float64).eps
_NOTHING = 1e-40  # what numbers below the smallest of float32 are rounded by

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d


class LinearRule(Rule):
    """y_t = W x_t + b at T positions.

    |y| <= |W| |x| + sqrt(T) |b|; dW = sum_t g_t x_t^T, so |dW|_F <= |g| |x|; db = sum_t g_t, so |db| <= sqrt(T) |g|.
    """

    has_lengths = True

    def __init__(self, module: nn.Linear, rounding: Rounding) -> None:
        self.module, self.rounding = module, rounding

    def measured(self, effort: Effort) -> Measurements:
        weight = self.module.weight.detach().double()  # once for all
        return _measured(as_matrices(weight, 1), self.module.bias, effort)

    def allowed(self, limit: float) -> dict[str, float]:
        return _allowed(limit, min(self.module.weight.shape), self.module.bias)

    def limited(self, effort: Effort) -> Measurements:
        return _limited(as_matrices(self.module.weight.detach().double(), 1), self.module.bias, effort)

    def lengths(self, norms: Norms, norm: str) -> dict[str, float]:
        return _lengths(norms, norm, self.module.bias)

    def scaled(self, norms: Norms, factors: Mapping[str, float], error: float) -> dict[str, float]:
        return _scaled(norms, factors, error)

    def largest(self, reaches: Sequence[Reach], norms: Norms) -> Reach:
        (x,) = reaches
        gain, bias = self._gain(norms), norms["bias"] * (1 + self.rounding.of_elements)
        dot = norms["rows"] * (1 + self.rounding.of_sum(self.module.in_features))
        return Reach.of(
            (*x.shape[:-1], self.module.out_features),
            norm=gain * x.norm + math.sqrt(x.rows) * bias,
            row=gain * x.row + bias,
            entry=dot * x.row + bias,
        )

    def gains(self, reaches: Sequence[Reach], norms: Norms) -> tuple[float, ...]:
        return (self._gain(norms),)

    def parameter_gains(self, reaches: Sequence[Reach], norms: Norms) -> dict[str, float]:
        (x,) = reaches
        slack = 1 + self.rounding.of_sum(x.rows)
        return _with_bias(self.module.bias, slack * x.norm, slack * math.sqrt(x.rows))

    def _gain(self, norms: Norms) -> float:
        terms = max(self.module.in_features, self.module.out_features)
        return norms["weight"] + self.rounding.of_sum(terms) * norms["frobenius"]


class ConvolutionRule(Rule):
    """A convolution with zero padding over P windows; see lipschitz.convolution for `cover` and its norm as operator.

    dW = sum_p g_p window_p^T, so |dW|_F <= |g| |windows|_F <= |g| min(sqrt(cover) |x|, sqrt(P) max_p |window_p|);
    db = sum_p g_p, so |db| <= sqrt(P) |g|.
    """

    has_lengths = True

    def __init__(
        self, module: Convolution, shape: Sequence[int], out: Sequence[int], rounding: Rounding
    ) -> None:
        self.module, self.rounding = module, rounding
        self.out = tuple(out)
        self.windows = windows_of(module, shape[1:], out[1:])
        self._cover, self._taps = self.windows.cover, self.windows.taps
        self._channels = module.in_channels // module.groups

    def measured(self, effort: Effort) -> Measurements:
        weight, groups = self.module.weight.detach().double(), self.module.groups
        return _measured(as_matrices(weight, groups), self.module.bias, effort) | operator_terms(
            weight, groups, self.windows, effort
        )

    def joined(self, found: Norms) -> dict[str, float]:
        return {name: found[name] for name in ("weight", "frobenius", "rows", "bias")} | {
            "operator": operator_from(found, self.windows)
        }

    def allowed(self, limit: float) -> dict[str, float]:
        side = min(as_matrices(self.module.weight, self.module.groups).shape[1:])
        return _allowed(limit, side, self.module.bias) | {"operator": limit * math.sqrt(self._cover)}

    def limited(self, effort: Effort) -> Measurements:
        matrices = as_matrices(self.module.weight.detach().double(), self.module.groups)
        return _limited(matrices, self.module.bias, effort)

    def lengths(self, norms: Norms, norm: str) -> dict[str, float]:
        return _lengths(norms, norm, self.module.bias)

    def scaled(self, norms: Norms, factors: Mapping[str, float], error: float) -> dict[str, float]:
        return _scaled(norms, factors, error, math.sqrt(self._cover))

    def largest(self, reaches: Sequence[Reach], norms: Norms) -> Reach:
        (x,) = reaches
        window = self._window(x)
        slack = 1 + self.rounding.of_sum(self._channels * self._taps)
        each = (norms["weight"] + (slack - 1) * norms["frobenius"]) * window  # the output of one window
        bias = norms["bias"] * (1 + self.rounding.of_elements)
        root = math.sqrt(self.windows.positions)
        # One window's output is bounded group by group; together they are within the root of the groups.
        apart = math.sqrt(self.module.groups)
        return Reach.of(
            self.out,
            norm=min(self._gain(norms) * x.norm, root * apart * each) + root * bias,
            entry=norms["rows"] * slack * window + bias,
        )

    def gains(self, reaches: Sequence[Reach], norms: Norms) -> tuple[float, ...]:
        return (self._gain(norms),)

    def parameter_gains(self, reaches: Sequence[Reach], norms: Norms) -> dict[str, float]:
        (x,) = reaches
        positions = self.windows.positions
        slack = 1 + self.rounding.of_sum(positions)
        # The windows of a group hold its channels only: all groups together are within `cover` of |x|.
        windows = min(math.sqrt(self._cover) * x.norm, math.sqrt(positions) * self._window(x))
        return _with_bias(self.module.bias, slack * windows, slack * math.sqrt(positions))

    def _window(self, x: Reach) -> float:
        """The largest norm of what one window holds of one group's channels."""
        return min(x.norm, math.sqrt(self._taps * self._channels) * x.entry)

    def _gain(self, norms: Norms) -> float:
        terms = self._taps * max(self._channels, self.module.out_channels // self.module.groups)
        rounding = self.rounding.of_sum(terms) * math.sqrt(self._cover) * norms["frobenius"]
        return norms["operator"] + rounding


class EmbeddingRule(Rule):
    """Rows of a table for T ids: |y| <= sqrt(T) max |row|. One id at all T positions gets sum_t g_t: sqrt(T) |g|."""

    def __init__(self, module: nn.Embedding, out: Sequence[int], rounding: Rounding) -> None:
        self.module, self.rounding, self.out = module, rounding, tuple(out)

    def measured(self, effort: Effort) -> Measurements:
        return {"rows": frobenius_norms(self.module.weight.unsqueeze(-2)).amax()}

    def allowed(self, limit: float) -> dict[str, float]:
        return {"rows": limit}

    def limited(self, effort: Effort) -> Measurements:
        return {"weight": frobenius_norms(self.module.weight.unsqueeze(-2)).unsqueeze(1)}

    def largest(self, reaches: Sequence[Reach], norms: Norms) -> Reach:
        return Reach.of(self.out, row=norms["rows"])

    def gains(self, reaches: Sequence[Reach], norms: Norms) -> tuple[float, ...]:
        return (0.0,)  # ids have no gradient

    def parameter_gains(self, reaches: Sequence[Reach], norms: Norms) -> dict[str, float]:
        positions = math.prod(self.out[:-1])
        return {"weight": math.sqrt(positions) * (1 + self.rounding.of_sum(positions))}


def _allowed(limit: float, side: int, bias: Tensor | None) -> dict[str, float]:
    shift = 0.0 if bias is None else limit
    return {"weight": limit, "frobenius": limit * math.sqrt(side), "rows": limit, "bias": shift}


def _measured(matrices: Tensor, bias: Tensor | None, effort: Effort) -> Measurements:
    """What a linear map of each window has: float64 [g, m, n], all outputs of a group by all of its inputs."""
    _, m, n = matrices.shape
    if effort == "frobenius":
        rows = torch.linalg.vector_norm(matrices, dim=2)
        frobenius: Wanted = Length(torch.linalg.vector_norm(rows, dim=1).amax(), m * n)
        return {
            "weight": frobenius,
            "frobenius": frobenius,
            "rows": Length(rows.amax(), n),
            "bias": _length(bias, matrices),
        }
    spectral = Spectral(matrices)
    longest = Length(torch.linalg.vector_norm(matrices, dim=2).amax(), n) if m > n else LongestRow(spectral)
    return {
        "weight": spectral,
        "frobenius": Frobenius(spectral),
        "rows": longest,
        "bias": _length(bias, matrices),
    }


def _limited(matrices: Tensor, bias: Tensor | None, effort: Effort) -> Measurements:
    found: Measurements = {
        "weight": _measured(matrices, None, effort)["weight"] if effort == "frobenius" else Spectral(matrices)
    }
    return found | ({} if bias is None else {"bias": _length(bias, matrices)})


def _lengths(norms: Norms, norm: str, bias: Tensor | None) -> dict[str, float]:
    length = norms["weight"] if norm == "spectral" else norms["frobenius"]
    return {"weight": length} | ({} if bias is None else {"bias": norms["bias"]})


def _scaled(
    norms: Norms, factors: Mapping[str, float], error: float, gathered: float = 1.0
) -> dict[str, float]:
    """f W + E with |E| <= error |f W| number by number, so |E| <= |E|_F <= error f |W|_F in every norm.

    `gathered` is what that becomes as an operator, which sees E in several windows: sqrt(cover).
    """
    found = dict(norms)
    if "weight" in factors:
        f = factors["weight"] * (1 + 4 * _EPS)
        lost = error * norms["frobenius"]
        found |= {name: f * (norms[name] + lost) + _NOTHING for name in ("weight", "frobenius", "rows")}
        if "operator" in norms:
            found["operator"] = f * (norms["operator"] + gathered * lost) + _NOTHING
    if "bias" in factors:
        found["bias"] = factors["bias"] * norms["bias"] * (1 + error + 4 * _EPS) + _NOTHING
    return found


def _length(bias: Tensor | None, like: Tensor) -> Tensor | Wanted:
    return like.new_zeros((), dtype=torch.float64) if bias is None else Vector(bias.detach())


def _with_bias(bias: Tensor | None, weight: float, shift: float) -> dict[str, float]:
    return {"weight": weight} if bias is None else {"weight": weight, "bias": shift}
