"""Clipped RNN, LSTM and GRU layers. All uses of a weight over time are bounded together:

    dW_ih = sum_t dz_t x_t^T,   dW_hh = sum_t dz'_t h_{t-1}^T,   db = sum_t dz_t

with dz_t, dz'_t the gradients of the pre-activations on the input's and on the hidden side. Backpropagation through
time runs unclipped inside the layer and gives all of them (gradients/rules/recurrent.py). W_ih is then clipped as a
linear layer over T positions, with its input clipped to C1. W_hh is clipped by |(sum_t |h_{t-1}| |dz'_tc|)_c|, with the
norms of the states, also to C1 C2. The biases are clipped to C2 by their exact norms. No bound depends on the number of
time steps. The gradient for the previous layer is as in linear_map.py, with the clip of W_ih.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from clipwise.errors import UnsupportedModelError
from clipwise.gradients.rules.recurrent import Backward, Layer, gru, lstm, rnn
from clipwise.layers.clipped import switch
from clipwise.layers.clipped.layer import (
    ClipConstants,
    ClippedLayer,
    Role,
    along,
    at_least_shortest,
    cleaned,
    clipped_input,
    input_scales,
    is_plain,
    lengths,
    scaled,
    upstream_scales,
    weighted_rows,
)
from clipwise.layers.clipped.linear import Matrix
from clipwise.layers.clipped.linear_map import along_the_sphere, passed_on

_FORWARD: dict[str, Any] = {
    "LSTM": torch.lstm,
    "GRU": torch.gru,
    "RNN_TANH": torch.rnn_tanh,
    "RNN_RELU": torch.rnn_relu,
}
_BACKWARD: dict[str, Backward] = {
    "LSTM": lstm,
    "GRU": gru,
    "RNN_TANH": rnn(lambda h: 1 - h.square()),
    "RNN_RELU": rnn(lambda h: (h > 0).to(h.dtype)),
}
_TIMES_FIRST = 1  # the axis of the examples in [T, B, ...]


class ClippedRecurrence(torch.autograd.Function):
    """One layer and direction, in its own time order; see above."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TBd: Tensor,
        h0_BH: Tensor,
        c0_BH: Tensor,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None,
        b_hh: Tensor | None,
        role: Role,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.role, ctx.examples, ctx.axis = role, x_TBd.shape[1], _TIMES_FIRST
        ctx.kind = kind = str(role.layer.layer.mode)
        norm_B = lengths(x_TBd.transpose(0, 1))
        scale_B = input_scales(norm_B, role.constants.input_norm)
        x_in = scaled(x_TBd, scale_B, _TIMES_FIRST)
        h_TBH, _, c_last = _layer_forward(kind, x_in, h0_BH, c0_BH, [w_ih, w_hh, b_ih, b_hh])
        ctx.save_for_backward(x_TBd, h_TBH, h0_BH, c0_BH, w_ih, w_hh, b_ih, b_hh, norm_B, scale_B)
        return h_TBH, h_TBH[-1].clone(), torch.zeros_like(c0_BH) if c_last is None else c_last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_TBH: Tensor, g_last: Tensor, g_cell: Tensor) -> tuple[Tensor | None, ...]:
        *kept, w_ih, w_hh, b_ih, b_hh, norm_B, scale_B = ctx.saved_tensors
        c, clips = ctx.role.constants, switch.is_clipping()
        switch.saw(ctx, torch.cat([g_TBH, g_last[None], g_cell[None]]))
        # Under autocast tensors may be bfloat16: sums use the dtype of the weights.
        x, h, h0, c0, g_TBH, g_last, g_cell = (t.to(w_ih.dtype) for t in (*kept, g_TBH, g_last, g_cell))
        x_in = scaled(x, scale_B, _TIMES_FIRST)
        layer = Layer(x_in, h, h0, c0 if ctx.kind == "LSTM" else None, w_ih, w_hh, b_ih, b_hh)
        sizes = [lengths(g_TBH.transpose(0, 1)), lengths(g_last), lengths(g_cell)]
        counts_B = torch.isfinite(torch.stack(sizes)).all(0)
        g_TBH, g_last, g_cell = (cleaned(g, counts_B, g.dim() - 2) for g in (g_TBH, g_last, g_cell))
        found = _BACKWARD[ctx.kind](layer, g_TBH, g_last, g_cell)
        inputs, hidden = (t.transpose(0, 1) for t in (found.input_TNG, found.hidden_TNG))
        x_BTd, before = x_in.transpose(0, 1), layer.before.transpose(0, 1)
        before = cleaned(before, torch.isfinite(lengths(before)))  # states of a ReLU may overflow
        matrix = Matrix()

        def weighted(g: Tensor, over: Tensor | None) -> tuple[Tensor, Tensor]:
            """nu of a weight's gradient, bounded with the input `over` if given; and nu g."""
            if over is None or not clips:
                nu_B = upstream_scales(lengths(g), c.grad_norm if clips else None, c.most)
            else:
                lengths_BGP = matrix.window_lengths(matrix.squares(over))
                at_least_shortest(lengths_BGP, c.weight_norm)
                nu_B = upstream_scales(matrix.gradient_norm(g.abs(), lengths_BGP), c.weight_norm, c.most)
            return nu_B, scaled(g, nu_B)

        nu_B, into_x = weighted(inputs, x_BTd if c.bound == "gradient" else None)
        dx, dw_ih = matrix.pull_back(into_x, x_BTd, w_ih, switch.goes_on(ctx), True)
        if dx is not None:
            dx = passed_on(dx, nu_B, c.mode)
            # The clipped input is s x: the chain rule to x adds one more s.
            dx = dx * along(scale_B, dx)
            dx = along_the_sphere(dx, cleaned(x.transpose(0, 1), scale_B), norm_B, scale_B)
            dx = dx.transpose(0, 1).to(kept[0].dtype)
        _, into_h = weighted(hidden, before)
        _, dw_hh = matrix.pull_back(into_h, before, w_hh, False, True)
        biases = [
            None if b is None else weighted_rows(g.sum(1), g.abs().sum(1), c)
            for b, g in ((b_ih, inputs), (b_hh, hidden))
        ]
        return dx, None, None, dw_ih, dw_hh, *biases, None


def _layer_forward(
    kind: str, x: Tensor, h0: Tensor, c0: Tensor, weights: list[Tensor | None]
) -> tuple[Tensor, Tensor, Tensor | None]:
    state: Any = (h0[None], c0[None]) if kind == "LSTM" else h0[None]
    given = [w for w in weights if w is not None]
    found = _FORWARD[kind](x, state, given, len(given) > 2, 1, 0.0, False, False, False)
    return found[0], found[1][0], found[2][0] if kind == "LSTM" else None


class ClippedRecurrent(ClippedLayer):
    """`nn.RNN`, `nn.LSTM` or `nn.GRU`, clipped: each weight to C1 C2 and each bias to C2 per example."""

    layer: nn.RNNBase

    def __init__(self, layer: nn.RNNBase, constants: ClipConstants, uses: int = 1, name: str = "") -> None:
        super().__init__(layer, constants, uses, name)
        self.refuse_if(proj_size=(layer.proj_size, "leave it out, and put a Linear layer behind it"))
        if any(not p.requires_grad for p in layer.parameters()):
            raise UnsupportedModelError(
                f"Layer {name!r} ({type(layer).__name__}) is frozen in part: train all of it, or freeze all of it."
            )

    def _take(self, constants: ClipConstants) -> None:
        directions = ("", "_reverse") if self.layer.bidirectional else ("",)
        suffixes = [f"l{level}{direction}" for level in range(self.layer.num_layers) for direction in directions]
        self._roles = {suffix: Role(self, constants, suffix) for suffix in suffixes}

    def bounds(self) -> Mapping[str, float]:
        c = self.constants
        return {
            name: c.grad_norm if name.startswith("bias") else c.weight_norm
            for name, _ in self.layer.named_parameters(remove_duplicate=False)
        }

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Shapes as for the layer: (B, T, d), or (T, B, d) without `batch_first`. The state needs no gradient."""
        layer, directions = self.layer, 1 + self.layer.bidirectional
        x = self.require_examples(x, least=3)
        x = x.transpose(0, 1) if layer.batch_first else x
        is_lstm = layer.mode == "LSTM"
        h0 = c0 = x.new_zeros(layer.num_layers * directions, x.shape[1], layer.hidden_size)
        if state is not None:
            h0, c0 = state if is_lstm else (state, c0)
        if h0.requires_grad or c0.requires_grad:
            raise UnsupportedModelError(
                f"Layer {self.name!r} ({type(layer).__name__}) got an initial state that needs a gradient, which has "
                "no bound here: detach it, or leave it out."
            )
        last_h, last_c = [], []
        for level in range(layer.num_layers):
            outputs = []
            for direction in range(directions):
                k = level * directions + direction
                own = x.flip(0) if direction else x
                y, h, c = self._run(own, h0[k], c0[k], f"l{level}{'_reverse' if direction else ''}")
                outputs.append(y.flip(0) if direction else y)
                last_h.append(h)
                last_c.append(c)
            x = torch.cat(outputs, -1) if directions > 1 else outputs[0]
            if level < layer.num_layers - 1:
                x = F.dropout(x, layer.dropout, self.training)
        h_n = torch.stack(last_h)
        final = (h_n, torch.stack(last_c)) if is_lstm else h_n
        return (x.transpose(0, 1) if layer.batch_first else x), final

    def _run(self, x: Tensor, h0: Tensor, c0: Tensor, suffix: str) -> tuple[Tensor, Tensor, Tensor]:
        kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        weights = [getattr(self.layer, f"{kind}_{suffix}", None) for kind in kinds]
        if not is_plain():
            return ClippedRecurrence.apply(x, h0, c0, *weights, self._roles[suffix])  # type: ignore[no-any-return, no-untyped-call]
        x = clipped_input(x.transpose(0, 1), self.constants.input_norm).transpose(0, 1)
        y, h, c = _layer_forward(str(self.layer.mode), x, h0, c0, weights)
        return y, h, c0 if c is None else c
