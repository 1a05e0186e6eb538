"""nn.RNN, nn.LSTM and nn.GRU where torch runs them as one fused operation.

oneDNN fuses an LSTM layer and direction on the CPU, in float32. cuDNN fuses all layers of any kind on the GPU. In other
cases every time step is a separate product and needs no rule here. `rnn`, `lstm` and `gru` compute the gradients. The
outputs of cuDNN's lower layers are recomputed layer by layer.

The backward recursion of one layer and direction recomputes all gates from the layer inputs x_t and outputs h_t with
one product over time. The recursion is then a few elementwise products per step, which give the gradients of the
pre-activations:

    RNN    h_t = f(z_t)                                      z_t = W_ih x_t + b_ih + W_hh h_{t-1} + b_hh
    LSTM   c_t = f c_{t-1} + i g,  h_t = W_hr (o tanh(c_t))  (i, f, g, o) = gates of z_t; W_hr only with proj_size
    GRU    h_t = (1 - u) n + u h_{t-1},  n = tanh(a_n + r b_n), with a_t = W_ih x_t + b_ih on the input side and
           b_t = W_hh h_{t-1} + b_hh on the hidden side, which have different gradients: r, u = sigmoid(a + b)

Each weight's gradient is a sum over time of outer products: dz_t x_t^T, dz_t h_{t-1}^T.

Legend: T steps, N sequences, d inputs, H hidden, P outputs (H, or proj_size), G the gates together; B examples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from clipwise.gradients.forms import Form, Outer, Written, at_least_float32
from clipwise.gradients.layout import Layout, Ragged
from clipwise.gradients.rules.registry import (
    FinishAll,
    Layouts,
    Outputs,
    RuleDoesNotApply,
    Shapes,
    register_for_all_outputs,
)
from clipwise.gradients.walk import Node

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

    @cached_property
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
    g = gates_TN4H[:, :, 2].contiguous().tanh_()  # vectorised in contiguous memory only
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


_LSTM = 2
_KINDS: dict[int, Backward] = {  # cuDNN's mode numbers
    0: rnn(lambda h: (h > 0).to(h.dtype)),
    1: rnn(lambda h: 1 - h.square()),
    _LSTM: lstm,
    3: gru,
}


@register_for_all_outputs("MkldnnRnnLayerBackward0")
def onednn_layer(node: Node, shapes: Shapes) -> FinishAll:
    """Outputs: h [T, N, H], the last h and c [N, H]. Operands: 1 W_ih, 2 W_hh, 3 b_ih, 4 b_hh."""
    if not set(shapes) <= {1, 2, 3, 4} or node._saved_mode != _LSTM:
        raise RuleDoesNotApply("the input or the initial state is computed from parameters")
    has_biases, backwards = node._saved_has_biases, node._saved_reverse
    x, h, h0, c0, w_ih, w_hh = (
        at_least_float32(t)
        for t in (
            *(node._saved_input, node._saved_result0, node._saved_hx_, node._saved_cx_),
            *(node._saved_weight0, node._saved_weight1),
        )
    )
    biases = [at_least_float32(b) for b in (node._saved_weight2, node._saved_weight3)] if has_biases else []
    b_ih, b_hh = biases or (None, None)
    layer = Layer(_in_time(x, backwards), _in_time(h, backwards), h0, c0, w_ih, w_hh, b_ih, b_hh)

    def finish(outputs: Outputs, layouts: Layouts) -> dict[int, Form]:
        layout = _layout_of_rows(outputs, layouts, {0: 1, 1: 0, 2: 0})
        dh = _in_time(_or_zeros(outputs.get(0), h), backwards)
        found = lstm(layer, dh, _or_zeros(outputs.get(1), h0), _or_zeros(outputs.get(2), c0))
        forms = _weight_forms(layer, found, layout)
        return {operand: forms[operand - 1] for operand in shapes}

    return finish


@register_for_all_outputs("CudnnRnnBackward0")
def cudnn(node: Node, shapes: Shapes) -> FinishAll:
    """Outputs: h of the top layer, the last h and c of all layers. Operands: 0 the input, then the weights."""
    weights = [at_least_float32(w) for w in node._saved_weight]
    if not set(shapes) <= set(range(1, len(weights) + 1)):
        raise RuleDoesNotApply("the input or the initial state is computed from parameters")
    if node._saved_num_layers > 1 and node._saved_train and node._saved_dropout > 0:
        raise RuleDoesNotApply("the dropout masks between the layers are not saved")
    mode, packed = node._saved_mode, list(node._saved_batch_sizes)
    time_axis = 1 if node._saved_batch_first and not packed else 0
    directions, depth = 1 + node._saved_bidirectional, node._saved_num_layers
    each = len(weights) // (directions * depth)
    projects = node._saved_proj_size > 0
    has_biases = each - projects == 4
    x, top = (at_least_float32(t).movedim(time_axis, 0) for t in (node._saved_input, node._saved_result0))
    h0 = at_least_float32(node._saved_hx)
    c0 = at_least_float32(node._saved_cx) if mode == _LSTM else None
    times = [Packed(packed, d == 1, x.device) if packed else Padded(d == 1) for d in range(directions)]

    def run(level: int, x_in_rows: Tensor) -> Tensor:
        """The outputs of a layer below the top."""
        first, last = level * directions, (level + 1) * directions
        own = weights[first * each : last * each]
        state = h0[first:last] if c0 is None else (h0[first:last], c0[first:last])
        options = (own, has_biases, 1, 0.0, False, directions == 2)
        function = {0: torch.rnn_relu, 1: torch.rnn_tanh, _LSTM: torch.lstm, 3: torch.gru}[mode]
        if packed:
            found: Tensor = function(x_in_rows, torch.tensor(packed), state, *options)[0]  # type: ignore[operator]
        else:
            found = function(x_in_rows, state, *options, False)[0]  # type: ignore[operator]
        return found

    def finish(outputs: Outputs, layouts: Layouts) -> dict[int, Form]:
        if packed:
            layout = _layout_of_packed(outputs, layouts, times[0])
        else:
            layout = _layout_of_rows(outputs, layouts, {0: 1 - time_axis, 1: 1, 2: 1})
        inputs = [x]
        for level in range(depth - 1):
            inputs.append(run(level, inputs[-1]))
        dh = outputs.get(0)
        dh = _or_zeros(None if dh is None else dh.movedim(time_axis, 0), top)
        dh_last = _or_zeros(outputs.get(1), h0)
        dc_last = None if c0 is None else _or_zeros(outputs.get(2), c0)
        forms: dict[int, Form] = {}
        for level in reversed(range(depth)):
            h = top if level == depth - 1 else inputs[level + 1]
            below = torch.zeros_like(inputs[level])
            for direction, time in enumerate(times):
                k = level * directions + direction
                own_h, own_dh = (time.own(t.chunk(directions, -1)[direction]) for t in (h, dh))
                w_ih, w_hh, *rest = weights[k * each : (k + 1) * each]
                b_ih, b_hh = rest[:2] if has_biases else (None, None)
                layer = Layer(
                    x_TNd=time.own(inputs[level]),
                    h_TNP=own_h,
                    h0_NP=h0[k],
                    c0_NH=None if c0 is None else c0[k],
                    w_ih_Gd=w_ih,
                    w_hh_GP=w_hh,
                    b_ih_G=b_ih,
                    b_hh_G=b_hh,
                    w_hr_PH=rest[-1] if projects else None,
                    valid_TN1=time.valid_TN1,
                )
                found = _KINDS[mode](layer, own_dh, dh_last[k], None if dc_last is None else dc_last[k])
                for j, form in enumerate(_weight_forms(layer, found, layout)):
                    forms[1 + k * each + j] = form
                below = below + time.back(found.input_TNG @ w_ih)
            dh = below
        return {operand: forms[operand] for operand in shapes}

    return finish


class Padded:
    """Time in the order of [T, N, ...], or reversed for a layer that runs backwards."""

    valid_TN1: Tensor | None = None

    def __init__(self, backwards: bool) -> None:
        self._backwards = backwards

    def own(self, t: Tensor) -> Tensor:
        """In the layer's own order of time: [T, N, ...]."""
        return _in_time(t, self._backwards)

    def back(self, t_TN: Tensor) -> Tensor:
        """In the order of the data."""
        return _in_time(t_TN, self._backwards)


class Packed(Padded):
    """Rows of a packed sequence: of the first step, then of the second, for all sequences that are long enough."""

    def __init__(self, sizes: list[int], backwards: bool, device: torch.device) -> None:
        super().__init__(backwards)
        size_T1 = torch.tensor(sizes, device=device)[:, None]
        number_N = torch.arange(sizes[0], device=device)
        valid_TN = number_N < size_T1
        row_TN = size_T1.cumsum(0) - size_T1 + number_N
        if backwards:  # each sequence from its own end
            step_T1 = torch.arange(len(sizes), device=device)[:, None]
            from_end = (valid_TN.sum(0) - 1 - step_T1).clamp_min(0)
            row_TN = row_TN.gather(0, from_end)
        self.row_TN = row_TN.masked_fill(~valid_TN, 0)
        self.valid_TN1 = valid_TN[..., None]

    def own(self, t: Tensor) -> Tensor:
        """[rows, x] -> [T, N, x]."""
        assert self.valid_TN1 is not None
        return t[self.row_TN] * self.valid_TN1

    def back(self, t_TN: Tensor) -> Tensor:
        """[T, N, x] -> [rows, x]."""
        assert self.valid_TN1 is not None
        valid_TN = self.valid_TN1[..., 0]
        rows = t_TN.new_zeros((int(valid_TN.sum()), t_TN.shape[-1]))
        rows[self.row_TN[valid_TN]] = t_TN[valid_TN]
        return rows


def _in_time(t: Tensor, backwards: bool) -> Tensor:
    return t.flip(0) if backwards else t


def _or_zeros(gradient: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if gradient is None else at_least_float32(gradient)


def _layout_of_rows(outputs: Outputs, layouts: Layouts, axis_of: dict[int, int]) -> Layout:
    """The layout of the examples along N in [T, N, ...], from any output that has a gradient."""
    live = list(outputs)
    if len(live) > 1:
        live = [k for k, g in outputs.items() if bool(g.any())] or live
    for k in live:
        if layouts[k].axis != axis_of[k]:
            raise RuleDoesNotApply("the examples do not lie along the rows")
    return layouts[live[0]].on_axis(1)


def _layout_of_packed(outputs: Outputs, layouts: Layouts, time: Padded) -> Layout:
    """The same for a packed sequence, with its rows along the first axis of the output."""
    if any(bool(outputs[k].any()) for k in outputs if k > 0):
        return _layout_of_rows({k: g for k, g in outputs.items() if k > 0}, layouts, {1: 1, 2: 1})
    if layouts[0].axis != 0 or not isinstance(time, Packed) or time.valid_TN1 is None:
        raise RuleDoesNotApply("the examples do not lie along the rows")
    owner_TN = layouts[0].owners(outputs[0].device)[time.row_TN]
    # A step without a gradient has no owner; the other steps show the owner of the sequence.
    return Ragged.of(1, owner_TN.masked_fill(~time.valid_TN1[..., 0], -1).amax(0), layouts[0].batch)


def _weight_forms(layer: Layer, found: Gradients, layout: Layout) -> list[Form]:
    """In torch's order: W_ih, W_hh, b_ih and b_hh if present, W_hr if present."""

    def rows(t_TNx: Tensor) -> Tensor:
        """Contiguous on CUDA. On a CPU a copy costs more than products of rows that are not."""
        rows_BTx = layout.rows(t_TNx)
        return rows_BTx if rows_BTx.device.type == "cpu" else rows_BTx.contiguous()

    inputs, x, before = rows(found.input_TNG), rows(layer.x_TNd), rows(layer.before)
    shared = found.hidden_TNG is found.input_TNG
    hidden = inputs if shared else rows(found.hidden_TNG)
    beside = (before.shape[-1], x.shape[-1]) if shared else (0, 0)
    forms: list[Form] = [Outer(inputs, x, beside=beside[0]), Outer(hidden, before, beside=beside[1])]
    if layer.b_ih_G is not None:
        of_bias = _bias_rows(found.input_TNG, layout)
        forms += [Written.of(of_bias), Written.of(of_bias if shared else _bias_rows(found.hidden_TNG, layout))]
    if found.projected_TNP is not None and found.unprojected_TNH is not None:
        forms.append(Outer(layout.rows(found.projected_TNP), layout.rows(found.unprojected_TNH)))
    return forms


def _bias_rows(g_TNG: Tensor, layout: Layout) -> Tensor:
    """[B, G]: sums over time first, which adds contiguous slices, then over an example's sequences."""
    return layout.rows(g_TNG.sum(0, keepdim=True)).sum(1)
