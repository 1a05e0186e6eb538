"""Bounds of recurrent layers over a public number of positions.

Backpropagation through time is linear in the incoming gradient, so it is bounded by its impulse response: a gradient of
norm 1 at position t gives the gates at position t - j a gradient of at most k_j. With the matrix K[t - j, t] = k_j,
S = |K| bounds the gradient at all gates. From there a layer is linear: |dx| <= |W| S |g|, |dW| <= S |g| |x|,
|dU| <= S |g| |h|, |db| <= sqrt(T) S |g|.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from clipwise.lipschitz.activations import dropped
from clipwise.lipschitz.batched_norms import Length, Spectral
from clipwise.lipschitz.matrix_norms import spectral_bounds
from clipwise.lipschitz.rule import Call, Effort, Measurements, Norms, Reach, Rule

RECURRENT = (nn.RNN, nn.GRU, nn.LSTM)


@dataclass(frozen=True)
class _Pass:
    """Bounds of one layer in one direction."""

    suffix: str
    gates: float  # S
    into: float  # |W|
    states: float  # the largest norm of all states h_t together


class RecurrentRule(Rule):
    """RNN, GRU and LSTM, with layers and directions. The initial state is 0, and only outputs are used.

    Kernels k_j, with u = |U|:

    - RNN: h = f(W x + U h + b), |f'| <= 1: k_j = u^j.
    - GRU: h' = (1 - z) n + z h. With m the largest |U_n h + b_n|, the gradients of the gates r, z, n and of the kept
      state z h together are at most c = sqrt(1 + m^2 / 16) times that of h', as
      z^2 + (1 - z)^2 c^2 + 4 z^2 (1 - z)^2 <= c^2: k_j = c (c sqrt(1 + u^2))^j.
    - LSTM: c' = f c + i g, h' = o tanh(c'), |c| <= T: the gates i, f, g get at most a = sqrt(17 + T^2) / 4 of the
      gradient of c', and o gets 1/4 of that of h': k_j = hypot(a C_j, H_j / 4), H_{j+1} = u k_j,
      C_{j+1} = C_j + H_{j+1}, from C_0 = H_0 = 1.
    """

    def __init__(self, call: Call) -> None:
        module: nn.RNNBase = call.target
        if len(call.shapes) != 1:
            raise call.refusal("a given initial state has no bound here: leave it out, so that it is 0")
        if not module.batch_first or module.proj_size:
            raise call.refusal("only batch_first=True without proj_size has a bound")
        if len(list(module.parameters())) < len(module._flat_weights):
            raise call.refusal("weights that are tied within it have no bound here: give each its own tensor")
        self.module, self.rounding = module, call.rounding
        self.length = call.shapes[0][0]
        self.directions = ("", "_reverse") if module.bidirectional else ("",)
        self.out = (self.length, module.hidden_size * len(self.directions))
        self.kept = dropped(module.dropout) * (1 + call.rounding.of_elements)

    def measured(self, effort: Effort) -> Measurements:
        found: Measurements = {}
        for name, p in self.module.named_parameters():
            rows = torch.linalg.vector_norm(p.detach(), dim=-1, dtype=torch.float64)
            if name.startswith("bias"):
                found[name] = Length(rows, p.numel())
                continue
            found[name + ".frobenius"] = Length(torch.linalg.vector_norm(rows), p.numel())
            found[name] = Spectral(p.detach().double().unsqueeze(0))
            found[name + ".rows"] = Length(rows.amax(), p.shape[1])
        return found

    def allowed(self, limit: float) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, p in self.module.named_parameters():
            found[name] = limit
            if p.ndim == 2:
                found[name + ".frobenius"] = limit * math.sqrt(min(p.shape))
                found[name + ".rows"] = limit
        return found

    def limited(self, norm: str) -> Measurements:
        measured = self.measured("spectral")
        key = "{}.frobenius" if norm == "frobenius" else "{}"
        return {name: measured.get(key.format(name), measured[name]) for name, _ in self.module.named_parameters()}

    def largest(self, reaches: Sequence[Reach], norms: Norms) -> Reach:
        return self._layers(reaches[0], norms)[1]

    def gains(self, reaches: Sequence[Reach], norms: Norms) -> tuple[float, ...]:
        layers, _ = self._layers(reaches[0], norms)
        return (math.prod(self._gain(passes) for _, passes in layers) * self.kept ** (len(layers) - 1),)

    def parameter_gains(self, reaches: Sequence[Reach], norms: Norms) -> dict[str, float]:
        layers, _ = self._layers(reaches[0], norms)
        slack = 1 + self.rounding.of_sum(self.length)
        found: dict[str, float] = {}
        above = 1.0  # the gain of the layers above
        for x, passes in reversed(layers):
            for one in passes:
                gates = slack * above * one.gates
                found["weight_ih" + one.suffix] = gates * x.norm
                found["weight_hh" + one.suffix] = gates * one.states
                if self.module.bias:
                    bias = gates * math.sqrt(self.length)
                    found["bias_ih" + one.suffix] = found["bias_hh" + one.suffix] = bias
            above *= self._gain(passes) * self.kept
        return found

    def _gain(self, passes: Sequence[_Pass]) -> float:
        """The gain of a layer: each direction gets its own part of the gradient."""
        return math.hypot(*(one.into * one.gates for one in passes))

    def _layers(self, x: Reach, norms: Norms) -> tuple[list[tuple[Reach, list[_Pass]]], Reach]:
        found: list[tuple[Reach, list[_Pass]]] = []
        for layer in range(self.module.num_layers):
            if layer > 0:
                x = Reach.of(x.shape, self.kept * x.norm, self.kept * x.row, self.kept * x.entry)
            passes = [self._pass(f"_l{layer}{direction}", x, norms) for direction in self.directions]
            found.append((x, passes))
            entry = 1 + self.rounding.of_elements * self.length
            if not self._is_bounded:
                entry = max(one.states for one in passes)
            x = Reach.of(self.out, norm=math.hypot(*(one.states for one in passes)), entry=entry)
        return found, x

    @property
    def _is_bounded(self) -> bool:
        """Whether states lie in [-1, 1]: tanh, a mean of a tanh and the previous state, or a tanh times a gate."""
        return not (isinstance(self.module, nn.RNN) and self.module.nonlinearity == "relu")

    def _pass(self, suffix: str, x: Reach, norms: Norms) -> _Pass:
        into, u = self._matrix("weight_ih" + suffix, norms), self._matrix("weight_hh" + suffix, norms)
        hidden = norms["bias_hh" + suffix] if self.module.bias else 0.0
        shift = hidden + norms["bias_ih" + suffix] if self.module.bias else 0.0
        rows = norms["weight_hh" + suffix + ".rows"]
        gates = self._toeplitz(self._kernel(u, rows, hidden))
        states = math.inf
        if self._is_bounded:
            size = self.length * self.module.hidden_size
            states = math.sqrt(size) * (1 + self.rounding.of_elements * self.length)
        if isinstance(self.module, nn.RNN):
            # |h_t| <= |W| |x_t| + |b| + u |h_{t-1}|: the same kernel, forward.
            states = min(states, gates * (into * x.norm + math.sqrt(self.length) * shift))
        return _Pass(suffix, gates, into, states)

    def _matrix(self, name: str, norms: Norms) -> float:
        """The norm of a weight, including the rounding of its products and of one time step."""
        terms = max(self.module.input_size, 4 * self.module.hidden_size)
        exact = norms[name] + self.rounding.of_sum(terms) * norms[name + ".frobenius"]
        return exact * (1 + 4 * self.rounding.of_elements)

    def _kernel(self, u: float, rows: float, hidden: float) -> list[float]:
        steps = range(self.length)
        if isinstance(self.module, nn.RNN):
            return [u**j for j in steps]
        if isinstance(self.module, nn.GRU):
            m = (rows * math.sqrt(self.module.hidden_size) + hidden) * (1 + 4 * self.rounding.of_elements)
            c = math.sqrt(1 + m * m / 16)
            return [c * (c * math.sqrt(1 + u * u)) ** j for j in steps]
        a = math.sqrt(17 + self.length**2) / 4
        cell = state = 1.0
        kernel: list[float] = []
        for _ in steps:
            kernel.append(math.hypot(a * cell, state / 4))
            state = u * kernel[-1]
            cell += state
        return kernel

    def _toeplitz(self, kernel: Sequence[float]) -> float:
        k = torch.tensor(kernel, dtype=torch.float64)
        lag = torch.arange(len(k)).unsqueeze(0) - torch.arange(len(k)).unsqueeze(1)
        matrix = torch.where(lag >= 0, k[lag.clamp(min=0)], 0)
        return float(spectral_bounds(matrix)) * (1 + 4 * self.rounding.of_elements)
