"""Backward recursion of one layer and direction of a recurrent network, from tensors of its forward pass.

All gates are recomputed from the layer inputs x_t and outputs h_t with one product over time. The recursion is then a
few elementwise products per step, which give the gradients of the pre-activations:
    RNN    h_t = f(z_t)                                      z_t = W_ih x_t + b_ih + W_hh h_{t-1} + b_hh
    LSTM   c_t = f c_{t-1} + i g,  h_t = W_hr (o tanh(c_t))  (i, f, g, o) = gates of z_t; W_hr only with proj_size
    GRU    h_t = (1 - u) n + u h_{t-1},  n = tanh(a_n + r b_n), with a_t = W_ih x_t + b_ih on the input side and
           b_t = W_hh h_{t-1} + b_hh on the hidden side, which have different gradients: r, u = sigmoid(a + b)

Each weight's gradient is a sum over time of outer products: dz_t x_t^T, dz_t h_{t-1}^T.

Legend: T steps, N rows, d inputs, H hidden, P outputs (H, or proj_size), G the gates together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# y x (1 - x) and y (1 - x^2) of (y, x), each in one pass.
_sigmoid_slope = torch.ops.aten.sigmoid_backward
_tanh_slope = torch.ops.aten.tanh_backward


@dataclass(frozen=True)
class Layer:
    """The tensors of one layer and direction, in its own order of time."""

    x_TNd: Tensor
    h_TNP: Tensor
    h0_NP: Tensor
    c0_NH: Tensor | None
    w_ih_Gd: Tensor
    w_hh_GP: Tensor
    b_ih_G: Tensor | None
    b_hh_G: Tensor | None
    w_hr_PH: Tensor | None = None
    valid_TN1: Tensor | None = None  # false after the end of a shorter sequence

    @property
    def before(self) -> Tensor:
        """h_{t-1}: [T, N, P]."""
        return torch.cat([self.h0_NP[None], self.h_TNP[:-1]])

    def keep_valid(self, t_TNx: Tensor) -> Tensor:
        """Zeros after the end of each sequence."""
        return t_TNx if self.valid_TN1 is None else t_TNx * self.valid_TN1

    def carried(self, t: int, new_Nx: Tensor, old_Nx: Tensor) -> Tensor:
        """The state passed on to step t - 1: after its end, a sequence passes it on unchanged."""
        return new_Nx if self.valid_TN1 is None else torch.where(self.valid_TN1[t], new_Nx, old_Nx)

    def input_side(self) -> Tensor:
        """W_ih x_t + b_ih for all steps."""
        return F.linear(self.x_TNd, self.w_ih_Gd, self.b_ih_G)

    def hidden_side(self) -> Tensor:
        """W_hh h_{t-1} + b_hh for all steps."""
        return F.linear(self.before, self.w_hh_GP, self.b_hh_G)

    def both_sides(self) -> Tensor:
        """Their sum, from one product: [W_ih W_hh] times the concatenation of x_t and h_{t-1}."""
        xh_TNk = torch.cat([self.x_TNd, self.before], -1)
        bias_G = None if self.b_ih_G is None or self.b_hh_G is None else self.b_ih_G + self.b_hh_G
        return F.linear(xh_TNk, torch.cat([self.w_ih_Gd, self.w_hh_GP], 1), bias_G)


@dataclass(frozen=True)
class Gradients:
    """Of the pre-activations on the input and hidden side, and of the two factors of W_hr."""

    input_TNG: Tensor
    hidden_TNG: Tensor
    projected_TNP: Tensor | None = None  # the gradient of h_t
    unprojected_TNH: Tensor | None = None  # o tanh(c_t)


Backward = Callable[[Layer, Tensor, Tensor, Tensor | None], Gradients]


def rnn(slope: Callable[[Tensor], Tensor]) -> Backward:
    """A plain recurrent layer; `slope` is the activation's derivative, as a function of its result."""

    def backward(layer: Layer, dh_TNP: Tensor, dh_last: Tensor, dc_last: Tensor | None) -> Gradients:
        slope_T = layer.keep_valid(slope(layer.h_TNP)).unbind()
        dz: list[Tensor] = []
        dh = dh_last
        for t in reversed(range(len(slope_T))):
            dz.append((dh_TNP[t] + dh) * slope_T[t])
            dh = layer.carried(t, dz[-1] @ layer.w_hh_GP, dh)
        stacked = torch.stack(dz[::-1])
        return Gradients(stacked, stacked)

    return backward


def lstm(layer: Layer, dh_TNP: Tensor, dh_last: Tensor, dc_last: Tensor | None) -> Gradients:
    """Gates in torch's order i, f, g, o. One buffer of their size holds z, then the gates, then dz."""
    z_TNG = layer.both_sides()
    gates_TN4H = z_TNG.view(*z_TNG.shape[:2], 4, z_TNG.shape[2] // 4)
    g = gates_TN4H[:, :, 2].tanh()
    i, f, unused, o = gates_TN4H.sigmoid_().unbind(2)
    assert layer.c0_NH is not None
    c_TNH = _cells(layer.c0_NH, f, i * g)
    tanh_c = c_TNH[1:].tanh()
    unprojected_TNH = None if layer.w_hr_PH is None else o * tanh_c

    # All terms that do not depend on the recursion, for every step at once: dz = (dc, dc, dc, dm) * slopes. Each slope
    # replaces its gate.
    by_c_T, f_T = _tanh_slope(o, tanh_c).unbind(), f.clone().unbind()
    _tanh_slope.grad_input(i, g, grad_input=unused)
    _sigmoid_slope.grad_input(g, i, grad_input=i)
    _sigmoid_slope.grad_input(c_TNH[:-1], f, grad_input=f)
    _sigmoid_slope.grad_input(tanh_c, o, grad_input=o)
    if layer.valid_TN1 is not None:
        z_TNG.mul_(layer.valid_TN1)
    dz_T, by_dc_T, by_dm_T = z_TNG.unbind(), gates_TN4H[:, :, :3].unbind(), gates_TN4H[:, :, 3].unbind()

    dh_full: list[Tensor] = []
    dh, dc = dh_last, torch.zeros_like(layer.c0_NH) if dc_last is None else dc_last
    for t in reversed(range(len(f_T))):
        dh_full.append(dh_TNP[t] + dh)
        dm = dh_full[-1] if layer.w_hr_PH is None else dh_full[-1] @ layer.w_hr_PH
        dc_here = torch.addcmul(dc, dm, by_c_T[t])
        by_dc_T[t].mul_(dc_here[:, None])
        by_dm_T[t].mul_(dm)
        dc = layer.carried(t, dc_here.mul_(f_T[t]), dc)
        dh = layer.carried(t, dz_T[t] @ layer.w_hh_GP, dh)
    if layer.w_hr_PH is None:
        return Gradients(z_TNG, z_TNG)
    return Gradients(z_TNG, z_TNG, layer.keep_valid(torch.stack(dh_full[::-1])), unprojected_TNH)


def _cells(c0_NH: Tensor, f_TNH: Tensor, ig_TNH: Tensor) -> Tensor:
    """c_0 .. c_T."""
    c_TNH = c0_NH.new_empty((len(f_TNH) + 1, *c0_NH.shape))
    c_TNH[0] = c0_NH
    for t, (f, ig) in enumerate(zip(f_TNH.unbind(), ig_TNH.unbind(), strict=True)):
        torch.addcmul(ig, f, c_TNH[t], out=c_TNH[t + 1])
    return c_TNH


def gru(layer: Layer, dh_TNP: Tensor, dh_last: Tensor, dc_last: Tensor | None) -> Gradients:
    """Gates in torch's order r, u, n (torch's own name for u is z)."""
    a_r, a_u, a_n = layer.input_side().chunk(3, dim=-1)
    b_r, b_u, b_n = layer.hidden_side().chunk(3, dim=-1)
    r, u = (a_r + b_r).sigmoid(), (a_u + b_u).sigmoid()
    n = (a_n + r * b_n).tanh()

    by_n = layer.keep_valid(_tanh_slope(1 - u, n))
    by_u = layer.keep_valid(_sigmoid_slope(layer.before - n, u))
    by_input = torch.cat([_sigmoid_slope(by_n * b_n, r), by_u, by_n], -1)
    by_hidden_n, u_T, by_input_T = (by_n * r).unbind(), u.unbind(), by_input.unbind()
    inputs: list[Tensor] = []
    hidden: list[Tensor] = []
    dh = dh_last
    H = u.shape[-1]
    for t in reversed(range(len(u_T))):
        dh_here = dh_TNP[t] + dh
        inputs.append(torch.cat([dh_here, dh_here, dh_here], -1) * by_input_T[t])
        hidden.append(torch.cat([inputs[-1][:, : 2 * H], dh_here * by_hidden_n[t]], -1))
        dh = layer.carried(t, dh_here * u_T[t] + hidden[-1] @ layer.w_hh_GP, dh)
    return Gradients(torch.stack(inputs[::-1]), torch.stack(hidden[::-1]))
