"""Constants from public data: about the stated share of examples is clipped, in every kind of layer."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from clipwise.layers import clip_inputs, norms_from_public
from clipwise.layers.clipped import unclipped
from tests.layers.clipped.cases import CASES, Case, inputs

EXAMPLES = 40
WITHOUT_INPUT_CLIP = ("embedding", "layer norm", "group norm")
SEVERAL_INPUTS = ("attention", "lstm, two layers")


def batch(case: Case) -> tuple[Tensor, Tensor]:
    """Inputs and losses of all sizes, the examples along the first axis."""
    random = torch.Generator().manual_seed(5)
    sizes = torch.randn(2, EXAMPLES, generator=random, dtype=torch.float64).exp()
    x = inputs(case, EXAMPLES)
    x = x.transpose(0, 1) if case.axis else x
    return (x if case.ids else x * sizes[0].view(-1, *[1] * (x.dim() - 1))), sizes[1]


def loss_of(case: Case) -> Callable[..., Tensor]:
    def loss(model: nn.Module, x: Tensor, sizes: Tensor) -> Tensor:
        y = model(x.transpose(0, 1) if case.axis else x).flatten(1)
        random = torch.Generator().manual_seed(6)
        return (y * torch.randn(y.shape[1], generator=random, dtype=y.dtype)).sum(1) * sizes

    return loss


def shares(model: nn.Module, case: Case, x: Tensor, sizes: Tensor) -> dict[str, float]:
    """Of each parameter: how many examples have a shorter gradient than without clips of gradients."""
    parameters = dict(model.named_parameters())
    found = dict.fromkeys(parameters, 0.0)
    for i in range(EXAMPLES):
        (one,) = loss_of(case)(model, x[i : i + 1], sizes[i : i + 1])
        short = torch.autograd.grad(one, list(parameters.values()), retain_graph=True)
        with unclipped():
            plain = torch.autograd.grad(one, list(parameters.values()))
        for name, a, b in zip(parameters, short, plain, strict=True):
            found[name] += (float(a.norm()) < 0.998 * float(b.norm())) / EXAMPLES
    return found


@pytest.mark.parametrize(("quantile", "bound"), [(0.5, "gradient"), (0.5, "upstream"), (0.8, "gradient")])
@pytest.mark.parametrize("name", CASES)
def test_about_the_stated_share_is_clipped(name: str, quantile: float, bound: str) -> None:
    case = CASES[name]
    torch.manual_seed(3)
    model = case.build().double()
    x, sizes = batch(case)
    norms = norms_from_public(model, loss_of(case), (x, sizes), quantile, bound)
    (input_norm,) = norms["input_norm"].values()
    if name.startswith(WITHOUT_INPUT_CLIP):
        assert input_norm == 1.0
    elif not name.startswith(SEVERAL_INPUTS):
        assert math.isclose(input_norm, float(x.flatten(1).norm(dim=1).quantile(quantile)), rel_tol=1e-9)
    model = clip_inputs(copy.deepcopy(model), **norms, bound=bound)
    found = shares(model, case, x, sizes)
    has_weights = any(p.dim() > 1 for p in model.parameters())
    of_interest = [found[n] for n, p in model.named_parameters() if p.dim() > 1 or not has_weights]
    # C2 is made for the part with the largest norms; the others are clipped less often.
    assert abs(max(of_interest) - (1 - quantile)) < 0.1, found


def test_later_layers_are_measured_behind_the_clips_of_earlier_ones() -> None:
    """Otherwise the second layer would clip nearly nobody: the first one has taken the long ones in."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 3, bias=False))
    x = torch.randn(EXAMPLES, 4) * torch.linspace(0.1, 10, EXAMPLES)[:, None]
    norms = norms_from_public(model, lambda m, x: m(x).logsumexp(1), (x,))
    first = norms["input_norm"]["0"]
    inside = x * (first / x.norm(dim=1, keepdim=True)).clamp(max=1)
    behind = model[0](inside).norm(dim=1)
    assert math.isclose(norms["input_norm"]["1"], float(behind.quantile(0.5)), rel_tol=2e-3)
    assert float(behind.quantile(0.5)) < 0.95 * float(model[0](x).norm(dim=1).quantile(0.5))
