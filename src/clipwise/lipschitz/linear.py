"""Bounds of linear layers, embeddings, sums, products, concatenations and parameters that a model uses directly."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from clipwise.lipschitz.matrix_norms import (
    EPS,
    Length,
    Spectral,
    frobenius_norms,
    largest_frobenius,
    length,
    longest_row,
)
from clipwise.lipschitz.rule import Call, Effort, Measurements, Norms, Reach, Rule

_NOTHING = 1e-40  # rounding error of subnormal float32 numbers


class AffineRule(Rule):
    """A linear map of windows with a bias. In each group of channels it maps all inputs of a window to all outputs."""

    has_lengths = True
    groups = 1
    gathered = 1.0  # the factor from the rounding error of the weights to that of the operator
    module: nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d

    @abstractmethod
    def _gain(self, norms: Norms) -> float:
        """The norm of the map from all inputs to all outputs, including rounding."""

    def gains(self, reaches: Sequence[Reach], norms: Norms) -> tuple[float, ...]:
        return (self._gain(norms),)

    def measured(self, effort: Effort) -> Measurements:
        spectral = Spectral(self._matrices())
        is_wide = spectral.matrices.shape[1] <= spectral.matrices.shape[2]
        rows = longest_row(spectral) if is_wide else self._length(spectral.matrices, 2)
        bias = self._bias_length()
        shift = spectral.matrices.new_zeros(()) if bias is None else bias
        return {"weight": spectral, "frobenius": largest_frobenius(spectral), "rows": rows, "bias": shift}

    def allowed(self, limit: float) -> dict[str, float]:
        shift = 0.0 if self.module.bias is None else limit
        frobenius = limit * math.sqrt(min(self._matrices().shape[1:]))
        return {"weight": limit, "frobenius": frobenius, "rows": limit, "bias": shift}

    def limited(self, norm: str) -> Measurements:
        matrices, bias = self._matrices(), self._bias_length()
        weight = Spectral(matrices) if norm == "spectral" else self._length(matrices, 2, 1)
        return {"weight": weight} if bias is None else {"weight": weight, "bias": bias}

    def lengths(self, norms: Norms, norm: str) -> dict[str, float]:
        return self._with_bias(norms["weight" if norm == "spectral" else "frobenius"], norms["bias"])

    def scaled(self, norms: Norms, factors: Mapping[str, float], error: float) -> dict[str, float]:
        """f W + E with |E| <= error |f W| elementwise, so |E| <= |E|_F <= error f |W|_F in every norm."""
        found = dict(norms)
        if "weight" in factors:
            f = factors["weight"] * (1 + 4 * EPS)
            lost = error * norms["frobenius"]
            found |= {name: f * (norms[name] + lost) + _NOTHING for name in ("weight", "frobenius", "rows")}
            if "operator" in norms:
                found["operator"] = f * (norms["operator"] + self.gathered * lost) + _NOTHING
        if "bias" in factors:
            found["bias"] = factors["bias"] * norms["bias"] * (1 + error + 4 * EPS) + _NOTHING
        return found

    def _matrices(self) -> Tensor:
        """float64 [g, m, n]: per group, outputs by inputs of a window."""
        weight = self.module.weight.detach().double()
        return weight.reshape(self.groups, weight.shape[0] // self.groups, -1)

    @staticmethod
    def _length(matrices: Tensor, *dims: int) -> Length:
        """The largest norm over these dimensions, one after another."""
        lengths, terms = matrices, 1
        for dim in dims:
            terms *= lengths.shape[dim]
            lengths = torch.linalg.vector_norm(lengths, dim=dim)
        return length(lengths.amax(), terms)

    def _bias_length(self) -> Length | None:
        if (bias := self.module.bias) is None:
            return None
        return length(torch.linalg.vector_norm(bias.detach(), dtype=torch.float64), bias.numel())

    def _with_bias(self, weight: float, bias: float) -> dict[str, float]:
        return {"weight": weight} if self.module.bias is None else {"weight": weight, "bias": bias}


class LinearRule(AffineRule):
    """y_t = W x_t + b at T positions.

    |y| <= |W| |x| + sqrt(T) |b|; dW = sum_t g_t x_t^T, so |dW|_F <= |g| |x|; db = sum_t g_t, so |db| <= sqrt(T) |g|.
    """

    module: nn.Linear

    def __init__(self, call: Call) -> None:
        self.module, self.rounding = call.target, call.rounding

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

    def parameter_gains(self, reaches: Sequence[Reach], norms: Norms) -> dict[str, float]:
        (x,) = reaches
        slack = 1 + self.rounding.of_sum(x.rows)
        return self._with_bias(slack * x.norm, slack * math.sqrt(x.rows))

    def _gain(self, norms: Norms) -> float:
        terms = max(self.module.in_features, self.module.out_features)
        return norms["weight"] + self.rounding.of_sum(terms) * norms["frobenius"]


class EmbeddingRule(Rule):
    """Rows of a table for T ids: |y| <= sqrt(T) max |row|. T equal ids have the gradient sum_t g_t: sqrt(T) |g|."""

    def __init__(self, call: Call) -> None:
        self.module, self.rounding, self.out = call.target, call.rounding, call.out
        if self.module.max_norm is not None:
            raise call.refusal(
                "max_norm changes the rows that a batch uses, without noise: leave it out, since rows are clipped"
            )
        if self.module.scale_grad_by_freq or self.module.sparse:
            raise call.refusal("scale_grad_by_freq and sparse have no bound here: leave them out")

    def measured(self, effort: Effort) -> Measurements:
        return {"rows": frobenius_norms(self.module.weight.unsqueeze(-2)).amax()}

    def allowed(self, limit: float) -> dict[str, float]:
        return {"rows": limit}

    def limited(self, norm: str) -> Measurements:
        return {"weight": frobenius_norms(self.module.weight.unsqueeze(-2)).unsqueeze(1)}

    def largest(self, reaches: Sequence[Reach], norms: Norms) -> Reach:
        return Reach.of(self.out, row=norms["rows"])

    def gains(self, reaches: Sequence[Reach], norms: Norms) -> tuple[float, ...]:
        return (0.0,)  # ids have no gradient

    def parameter_gains(self, reaches: Sequence[Reach], norms: Norms) -> dict[str, float]:
        positions = math.prod(self.out[:-1])
        return {"weight": math.sqrt(positions) * (1 + self.rounding.of_sum(positions))}


class BroadcastRule(Rule):
    """The base of x + y and x * y. A value broadcast r times has sqrt(r) times the norm, and receives r gradients."""

    def __init__(self, call: Call) -> None:
        self.out, self.rounding = call.out, call.rounding
        self.slack = 1 + call.rounding.of_elements  # of a value
        self.summing = 1 + call.rounding.of_sum(math.prod(call.out))  # of a gradient

    def _times(self, x: Reach) -> float:
        """The factor by which broadcasting increases the norm of x."""
        return math.sqrt(math.prod(self.out) / x.size) if x.size else 1.0

    def _whole(self, x: Reach) -> float:
        return self._times(x) * x.norm

    def _row(self, x: Reach) -> float:
        """x.row after broadcasting, which may repeat an entry along the last dimension."""
        last = x.shape[-1] if x.shape else 1
        wanted = self.out[-1] if self.out else 1
        return x.row if last == wanted else math.sqrt(wanted) * x.entry


class SumRule(BroadcastRule):
    """x + y or x - y."""

    def largest(self, reaches: Sequence[Reach], norms: Norms) -> Reach:
        return Reach.of(
            self.out,
            self.slack * sum(map(self._whole, reaches)),
            self.slack * sum(map(self._row, reaches)),
            self.slack * sum(x.entry for x in reaches),
        )

    def gains(self, reaches: Sequence[Reach], norms: Norms) -> tuple[float, ...]:
        return tuple(self.summing * self._times(x) for x in reaches)


class ProductRule(BroadcastRule):
    """x * y, elementwise: each is the other's slope. If x is broadcast, |dx_j| <= |g| |y over j|."""

    def largest(self, reaches: Sequence[Reach], norms: Norms) -> Reach:
        x, y = reaches
        return Reach.of(
            self.out,
            self.slack * min(self._whole(x) * y.entry, self._whole(y) * x.entry),
            self.slack * min(self._row(x) * y.entry, self._row(y) * x.entry),
            self.slack * x.entry * y.entry,
        )

    def gains(self, reaches: Sequence[Reach], norms: Norms) -> tuple[float, ...]:
        return tuple(
            self.summing * min(self._whole(other), self._times(one) * other.entry)
            for one, other in (reaches, reversed(reaches))
        )


class JoinRule(Rule):
    """Concatenation: |y|^2 = sum |x_i|^2, and each input gets its own part of the gradient."""

    splits_gradient = True

    def __init__(self, out: Sequence[int], along_rows: bool) -> None:
        self.out, self.along_rows = out, along_rows

    def largest(self, reaches: Sequence[Reach], norms: Norms) -> Reach:
        rows = [x.row for x in reaches]
        row = math.hypot(*rows) if self.along_rows else max(rows)
        return Reach.of(self.out, math.hypot(*(x.norm for x in reaches)), row, max(x.entry for x in reaches))

    def gains(self, reaches: Sequence[Reach], norms: Norms) -> tuple[float, ...]:
        return (1.0,) * len(reaches)


class ParameterRule(Rule):
    """A parameter or buffer that the model uses outside a module with a rule."""

    def __init__(self, tensor: Tensor, shape: Sequence[int]) -> None:
        self.tensor, self.shape = tensor, tuple(shape)
        self.is_parameter = isinstance(tensor, torch.nn.Parameter)

    def measured(self, effort: Effort) -> Measurements:
        flat = self.tensor.detach().reshape(1, -1)
        return {"norm": frobenius_norms(flat), "entry": flat.double().abs().amax()}

    def allowed(self, limit: float) -> dict[str, float]:
        return {"norm": limit, "entry": limit}

    def limited(self, norm: str) -> Measurements:
        return {"": self.measured("spectral")["norm"]} if self.is_parameter else {}

    def largest(self, reaches: Sequence[Reach], norms: Norms) -> Reach:
        return Reach.of(self.shape, norm=norms["norm"], entry=norms["entry"])

    def gains(self, reaches: Sequence[Reach], norms: Norms) -> tuple[float, ...]:
        return ()

    def parameter_gains(self, reaches: Sequence[Reach], norms: Norms) -> dict[str, float]:
        return {"": 1.0} if self.is_parameter else {}
