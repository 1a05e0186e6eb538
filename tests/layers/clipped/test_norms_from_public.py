"""Constants from public data clip about the stated share of examples, in every kind of layer."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipwise.errors import ConfigurationError
from clipwise.layers import clip_inputs, norms_from_public
from clipwise.layers.clipped import unclipped
from tests.layers.clipped.cases import CASES, Case, inputs

EXAMPLES = 40
WITHOUT_INPUT_CLIP = ("embedding", "layer norm", "group norm")
SEVERAL_INPUTS = ("attention", "lstm, two layers")


def batch(case: Case) -> tuple[Tensor, Tensor]:
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
    """Per parameter, the share of examples whose gradient is shorter than without gradient clips."""
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
    # C2 is chosen for the largest norms; other parameters are clipped less often.
    assert abs(max(of_interest) - (1 - quantile)) < 0.1, found


def test_later_layers_are_measured_after_the_clips_of_earlier_ones() -> None:
    """Otherwise the second layer would clip nearly no example, since the first one clips the long ones."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 3, bias=False))
    x = torch.randn(EXAMPLES, 4) * torch.linspace(0.1, 10, EXAMPLES)[:, None]
    norms = norms_from_public(model, lambda m, x: m(x).logsumexp(1), (x,))
    first = norms["input_norm"]["0"]
    inside = x * (first / x.norm(dim=1, keepdim=True)).clamp(max=1)
    behind = model[0](inside).norm(dim=1)
    assert math.isclose(norms["input_norm"]["1"], float(behind.quantile(0.5)), rel_tol=2e-3)
    assert float(behind.quantile(0.5)) < 0.95 * float(model[0](x).norm(dim=1).quantile(0.5))


def with_rows_that_are_not_finite(case: Case, x: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Double the rows: the new ones have a NaN or an infinity in the input or as loss."""
    bad_x, bad_sizes = x.clone(), sizes.clone()
    if case.ids:
        bad_sizes[:] = math.nan
    else:
        bad_x[::3] = math.nan
        bad_x[1::3, 0] = math.inf
        bad_sizes[2::3] = math.nan
    return torch.cat([bad_x, x]), torch.cat([bad_sizes, sizes])


@pytest.mark.parametrize("bound", ["gradient", "upstream"])
@pytest.mark.parametrize("name", CASES)
def test_examples_that_are_not_finite_are_left_out(name: str, bound: str) -> None:
    case = CASES[name]
    torch.manual_seed(3)
    model = case.build().double()
    x, sizes = batch(case)
    expected = norms_from_public(model, loss_of(case), (x, sizes), bound=bound)
    given = with_rows_that_are_not_finite(case, x, sizes)
    found = norms_from_public(model, loss_of(case), given, bound=bound)
    assert found["input_norm"] == pytest.approx(expected["input_norm"], rel=1e-5)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)


def test_a_non_finite_example_is_left_out_in_later_layers_too() -> None:
    """The first layer replaces it by 0, so it is finite in later layers."""
    model, (x, y) = mlp(), rows()
    x[:5] = math.nan
    few = norms_from_public(model, losses_of, (x[5:], y[5:]))
    found = norms_from_public(model, losses_of, (x, y))
    for argument in ("input_norm", "grad_norm"):
        assert found[argument] == pytest.approx(few[argument], rel=1e-4)  # type: ignore[literal-required]


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 3))


def rows(count: int = 8) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(count, 20), torch.randint(0, 3, (count,))


def losses_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def with_a_silent_head() -> nn.Sequential:
    """The head's weights are 0, so the previous layer gets no gradient."""
    model = mlp()
    nn.init.zeros_(model[2].weight)  # type: ignore[arg-type]
    return model


def test_norms_of_0_are_refused_by_the_name_of_the_layer() -> None:
    x, y = rows()
    with pytest.raises(ConfigurationError, match=r"layer '0'.* cannot be measured: look at the rows"):
        norms_from_public(mlp(), losses_of, (torch.full_like(x, math.nan), y))
    with pytest.raises(ConfigurationError, match="what goes into layer '0' is 0"):
        norms_from_public(mlp(), losses_of, (torch.zeros_like(x), y))
    with pytest.raises(ConfigurationError, match="what comes back to layer '0' is 0"):
        norms_from_public(with_a_silent_head(), losses_of, (x, y))


def test_blank_rows_are_refused_only_if_the_quantile_is_one_of_them() -> None:
    x, y = rows()
    x[:5] = 0
    with pytest.raises(ConfigurationError, match=r"quantile 0\.5 of its norms is below 1e-10.*larger quantile"):
        norms_from_public(mlp(), losses_of, (x, y))
    assert norms_from_public(mlp(), losses_of, (x, y), quantile=0.9)["input_norm"]["0"] > 1


class Folded(nn.Module):
    """Merges positions into the first dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x.reshape(-1, 5)).view(len(x), -1)
        return y


class Idle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(20, 3), nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.used(x) + self.idle(x).detach()
        return y


Given = tuple[Callable[[], nn.Module], Callable[..., Tensor], tuple[Tensor, Tensor]]
BAD: dict[str, tuple[Given, str]] = {
    "no rows": ((mlp, losses_of, rows(0)), "batch holds no example"),
    "another width": (
        (mlp, losses_of, (rows()[0][:, :7], rows()[1])),
        r"batch: loss\(model, \*batch\) does not take such rows",
    ),
    "a detached loss": ((mlp, lambda *given: losses_of(*given).detach(), rows()), "loss must .* with a gradient"),
    "a layer that is detached": ((Idle, losses_of, rows()), "loss: layer 'idle' takes no part"),
    "rows of something else": ((Folded, losses_of, rows()), "layer 'first' got another number of rows"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_measured_is_refused_by_the_name_of_the_argument(what: str) -> None:
    (build, loss, given), message = BAD[what]
    with pytest.raises(ConfigurationError, match=message):
        norms_from_public(build(), loss, given)


@pytest.mark.parametrize("quantile", ["a", None, torch.tensor(0.5), torch.tensor([0.1, 0.2]), 1j, True, math.nan])
def test_a_quantile_is_a_number_between_0_and_1(quantile: Any) -> None:
    with pytest.raises(ConfigurationError, match="quantile must be a finite number"):
        norms_from_public(mlp(), losses_of, rows(), quantile)
    with pytest.raises(ConfigurationError, match="quantile must be a finite number that is at least 0 and at most 1"):
        norms_from_public(mlp(), losses_of, rows(), 1.5)


def test_numbers_of_numpy_and_a_loop_without_gradients_make_no_difference() -> None:
    expected = norms_from_public(mlp(), losses_of, rows(), 0.5)
    with torch.no_grad():
        assert norms_from_public(mlp(), losses_of, rows(), np.float32(0.5)) == expected  # type: ignore[arg-type]


def test_the_largest_input_of_attention_counts() -> None:
    class Crossed(nn.Module):
        def __init__(self, times: tuple[float, ...]) -> None:
            super().__init__()
            self.attention, self.times = nn.MultiheadAttention(4, 2, batch_first=True), times

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.attention(*(t * x for t in self.times), need_weights=False)[0]
            return y

    x = torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(0))
    expected = 3 * float(x.flatten(1).norm(dim=1).quantile(0.5))
    for times in ((3.0, 1.0, 1.0), (1.0, 3.0, 1.0), (1.0, 1.0, 3.0)):
        found = norms_from_public(Crossed(times), lambda m, x: m(x).square().sum((1, 2)), (x,))
        assert found["input_norm"]["attention"] == pytest.approx(expected, rel=1e-3)
