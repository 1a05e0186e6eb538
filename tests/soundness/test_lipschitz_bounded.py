"""Bounded weights in the whole engine: one record nearly reaches the stated sensitivity, and never exceeds it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clipwise import Lipschitz, Private, make_private
from clipwise.clipping import Site
from clipwise.clipping import lipschitz as under_test
from clipwise.layers import ClipInput
from clipwise.lipschitz import Huber, trace
from clipwise.noise.key import NoiseKey
from clipwise.privacy import Adjacency
from tests.lipschitz.networks import FAMILIES, draw
from tests.sites import site

SLACK = 1 + 1e-5
N, X, C = 6, 0.8, 1.5
Losses = Callable[[Tensor, Tensor], Tensor]


def steep(outputs: Tensor, factors: Tensor) -> Tensor:
    """A linear loss, a thousand times as steep as the declared one."""
    return 1000 * factors * (outputs[:, 0] - outputs[:, 1])


def aligned(kind: str) -> nn.Module:
    """All layers have rank one and aligned singular vectors, so the product of their norms is reached."""
    first: nn.Module = nn.Linear(4, 3, bias=False)
    if kind == "convolution":
        first = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2, bias=False), nn.Flatten())
    model = nn.Sequential(ClipInput(X), first, nn.ReLU(), nn.Linear(3, 2, bias=False)).double()
    weights = list(model.parameters())
    with torch.no_grad():
        weights[0].copy_(torch.ones(3, 4).reshape(weights[0].shape))
        weights[1].copy_(torch.tensor([[1.0], [-1.0]]) * torch.ones(2, 3))
    return model


def run(model: nn.Module, rows: Tensor, factors: Tensor, **options: Any) -> Private:
    """A run with every record in every step by default."""
    defaults: dict[str, Any] = {"sampling": "full", "noise_multiplier": 0.0}
    return make_private(
        model, torch.optim.SGD(model.parameters(), lr=0.05), TensorDataset(rows, factors), **{**defaults, **options}
    )


def released(private: Private, model: nn.Module, losses: Losses = steep) -> dict[str, Tensor]:
    """The sum of one step, before noise and division, without an update."""
    for x, factors in private.loader:
        outputs = model(x)
        if private.backward(losses(outputs, factors), outputs):
            break
    return {n: p.grad.double() * private.divisor for n, p in model.named_parameters()}  # type: ignore[union-attr]


def moved(private: Private, one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, float]:
    """Return each part's movement over its stated sensitivity; infinite for NaN."""
    found = {}
    for part in private.parts():
        norm = math.hypot(*(float((one[n] - other[n]).norm()) for n in part.parameters))
        found[part.name] = norm / part.sensitivity if norm == norm else math.inf
    return found


def shares(adjacency: str, kind: str = "linear", **options: Any) -> dict[str, float]:
    """An adversary along the network's singular direction, far beyond the clip, among ordinary records."""
    torch.manual_seed(0)
    rows, factors = torch.randn(N, 4).double(), torch.ones(N).double()
    rows[-1], factors[-1] = 1e6, 1e3
    strategy = Lipschitz(C, X, **options)
    model = aligned(kind)
    private = run(model, rows, factors, clipping=strategy, adjacency=adjacency)
    with_adversary = released(private, model)
    model.zero_grad()
    if adjacency == "zero-out":
        rows, factors = rows[:-1], factors[:-1]
    else:
        factors[-1] = -1e3  # pulls in the opposite direction
    neighbour = run(model, rows, factors, clipping=strategy, adjacency=adjacency)
    for mine, its in zip(private.parts(), neighbour.parts(), strict=True):
        assert mine.sensitivity == pytest.approx(its.sensitivity, rel=1e-9)
    return moved(private, with_adversary, released(neighbour, model))


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("kind", ["linear", "convolution"])
@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
def test_a_planted_adversary_reaches_the_bound_and_does_not_exceed_it(adjacency: str, kind: str, fixed: bool) -> None:
    found = shares(adjacency, kind, fixed=fixed)
    assert len(found) == 2
    for share in found.values():
        assert 0.999 < share <= 1


def test_without_the_clip_at_the_outputs_a_scaled_loss_would_exceed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "clip_output_gradients", lambda gradients, constant: gradients)
    assert min(shares("zero-out").values()) > 1000


def test_replacement_would_exceed_the_sensitivity_of_zero_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Site, "factor", 1.0)
    assert min(shares("replace-one").values()) > 1.99


ADVERSARIES = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10**6),
        "length": st.sampled_from([0.0, 1e-30, 1.0, 1e6, 1e30, math.inf, math.nan]),
        "factor": st.sampled_from([1.0, -1.0, 1e3, 1e15, 1e30, math.inf, math.nan]),
        "limit": st.sampled_from([0.3, 1.0, 3.0]),
        "fixed": st.booleans(),
        "norm": st.sampled_from(["spectral", "frobenius"]),
    }
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_no_example_exceeds_the_bound_in_any_network(family: str) -> None:
    @settings(max_examples=15, deadline=None, derandomize=True, phases=[Phase.generate])
    @given(ADVERSARIES)
    def check(case: dict[str, Any]) -> None:
        model, shape = draw(family, case["seed"])
        model.eval()  # the same masks for both
        used = {name for op in trace(model, shape).operations for name in op.parameters.values()}
        for name, p in model.named_parameters():
            p.requires_grad_(name in used)
        given_norm = None if family == "table" else model[0].max_norm  # type: ignore[index]
        strategy = Lipschitz(case["limit"], given_norm, case["norm"], case["fixed"], loss=Huber(0.5), input_shape=shape)
        twice = strategy.attach(site(model, Adjacency.REPLACE_ONE))
        clipper = strategy.attach(site(model))
        x = torch.randint(0, 3, (4, *shape)) if family == "table" else torch.randn(4, *shape)
        if family != "table":
            x[-1] *= case["length"]
        factors = torch.tensor([1.0, 1.0, 1.0, case["factor"]])

        def total(rows: Tensor, factors: Tensor) -> dict[str, Tensor]:
            outputs = model(rows)
            return clipper.sum_at_outputs(outputs.flatten(1).sum(1) * factors, outputs)

        mine, without = total(x, factors), total(x[:-1], factors[:-1])
        for bound, double in zip(clipper.bounds, twice.bounds, strict=True):
            (name,) = bound.parameters
            assert float((mine[name] - without[name]).double().norm()) <= bound.sensitivity * SLACK
            assert double.sensitivity == pytest.approx(2 * bound.sensitivity, rel=1e-4)

    check()


@pytest.mark.parametrize("sampling", ["poisson", "fixed-size", "shuffled"])
def test_neighbours_with_the_same_releases_have_the_same_bounds(sampling: str) -> None:
    """Bounds follow from releases alone: the other run has the same bounds at every step."""
    torch.manual_seed(1)
    rows, factors = torch.randn(12, 4).double(), torch.ones(12).double()
    changed = rows.clone()
    changed[3] = 1e6 * torch.tensor([1.0, -2.0, 1.0, 3.0])
    runs = []
    for data in (rows, changed):
        torch.manual_seed(2)
        model = nn.Sequential(ClipInput(X), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
        private = run(model, data, factors, clipping=Lipschitz(C, X), sampling=sampling, batch_size=4, ema=0.5)
        private._context.keys.key = NoiseKey.from_seed(7, b"the same draws")
        runs.append((model, private))
    (one, first), (other, second) = runs
    differs = False
    for _ in range(3):
        for (x, f), (v, g) in zip(first.loader, second.loader, strict=True):
            for model, private, inputs, weights in ((one, first, x, f), (other, second, v, g)):
                outputs = model(inputs)
                assert private.backward(steep(outputs, weights), outputs)
            assert first.parts() == second.parts()
            for part, p, q in zip(first.parts(), one.parameters(), other.parameters(), strict=True):
                assert p.grad is not None and q.grad is not None
                change = float((p.grad - q.grad).norm()) * first.divisor
                limit = part.sensitivity if sampling == "fixed-size" else 2 * part.sensitivity
                assert change <= limit
                differs |= change > 0
                q.grad.copy_(p.grad)  # the run on D' uses the release of D
            second._context.weights.released.remember()  # as its own release
            for private in (first, second):
                private.optimizer.step()
                private.optimizer.zero_grad()
    assert differs
    averages = [run.ema.state_dict()["averages"] for run in (first, second)]
    assert all(torch.equal(averages[0][n], averages[1][n]) for n in averages[0])
