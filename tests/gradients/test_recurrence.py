"""The recursions of recurrent.py against plain autograd, in float64, for all kinds, states and lengths.

The fused operations of one machine cover only some of these cases.

Legend: T steps, N rows, d inputs, H hidden, P outputs, G gates.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from clipwise.gradients.rules.recurrent import _KINDS, Layer

T, N, D, H = 6, 4, 3, 5
LENGTHS = [6, 4, 4, 1]
NETWORKS = {
    "relu": (0, lambda bias: nn.RNN(D, H, nonlinearity="relu", bias=bias)),
    "tanh": (1, lambda bias: nn.RNN(D, H, bias=bias)),
    "lstm": (2, lambda bias: nn.LSTM(D, H, bias=bias)),
    "projected lstm": (2, lambda bias: nn.LSTM(D, H, bias=bias, proj_size=2)),
    "gru": (3, lambda bias: nn.GRU(D, H, bias=bias)),
}


def outer_sum(left_TNm: Tensor, right_TNn: Tensor) -> Tensor:
    return torch.einsum("tnm,tnk->mk", left_TNm, right_TNn)


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_gradients_of_the_weights_are_those_of_autograd(name: str, bias: bool, ragged: bool, device: str) -> None:
    torch.manual_seed(0)
    mode, build = NETWORKS[name]
    network = build(bias).to(device, torch.float64)
    P = getattr(network, "proj_size", 0) or H
    x_TNd, dh_TNP = (torch.randn(T, N, k, dtype=torch.float64, device=device) for k in (D, P))
    h0, dh_last = (torch.randn(1, N, P, dtype=torch.float64, device=device) for _ in range(2))
    c0, dc_last = (torch.randn(1, N, H, dtype=torch.float64, device=device) for _ in range(2))
    state = (h0, c0) if mode == 2 else h0

    valid_TN1 = None
    if ragged:
        valid_TN1 = (torch.arange(T)[:, None] < torch.tensor(LENGTHS))[..., None].to(device)
        dh_TNP = dh_TNP * valid_TN1
        packed, last = network(pack_padded_sequence(x_TNd, torch.tensor(LENGTHS)), state)
        out_TNP, _ = pad_packed_sequence(packed)
    else:
        out_TNP, last = network(x_TNd, state)
    last = last if mode == 2 else (last,)
    arriving = [dh_TNP, dh_last, dc_last][: 1 + len(last)]
    expected = torch.autograd.grad([out_TNP, *last], list(network.parameters()), arriving)

    w_ih, w_hh, *rest = (p.detach() for p in network.parameters())
    b_ih, b_hh = rest[:2] if bias else (None, None)
    layer = Layer(
        x_TNd=x_TNd,
        h_TNP=out_TNP.detach(),
        h0_NP=h0[0],
        c0_NH=c0[0] if mode == 2 else None,
        w_ih_Gd=w_ih,
        w_hh_GP=w_hh,
        b_ih_G=b_ih,
        b_hh_G=b_hh,
        w_hr_PH=rest[-1] if P != H else None,
        valid_TN1=valid_TN1,
    )
    given = [t.clone() for t in (layer.x_TNd, layer.h_TNP, dh_TNP, dh_last, dc_last)]
    found = _KINDS[mode](layer, dh_TNP, dh_last[0], dc_last[0] if mode == 2 else None)

    sums = [outer_sum(found.input_TNG, layer.x_TNd), outer_sum(found.hidden_TNG, layer.before)]
    if bias:
        sums += [found.input_TNG.sum((0, 1)), found.hidden_TNG.sum((0, 1))]
    if P != H:
        assert found.projected_TNP is not None and found.unprojected_TNH is not None
        sums.append(outer_sum(found.projected_TNP, found.unprojected_TNH))
    torch.testing.assert_close(sums, list(expected), rtol=1e-12, atol=1e-12)
    # Internal buffers are overwritten; the arguments are not.
    assert all(
        torch.equal(a, b) for a, b in zip(given, (layer.x_TNd, layer.h_TNP, dh_TNP, dh_last, dc_last), strict=True)
    )
