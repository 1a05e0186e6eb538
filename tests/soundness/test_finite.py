"""A non-finite example contributes 0 and does not affect others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from clipwise.clipping import PerExample
from clipwise.errors import UnsupportedModelError
from clipwise.gradients import METHODS, examples
from tests.gradients.cases import CASES, Case, trainable
from tests.soundness.neighbours import Batch, attach, clipped_sum, distance

BY_NAME = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
FLOATING = pytest.mark.parametrize(
    "case", [c for c in CASES if all(x.is_floating_point() for x in c.inputs(1))], ids=lambda c: c.name
)
SIZE = 4


def drawn(case: Case, dtype: torch.dtype, seed: int = 1) -> Batch:
    return Batch(case.draw(SIZE, dtype, seed), torch.ones(SIZE, dtype=dtype))


MOVED = {c.name for c in CASES if " packed" in c.name or c.name in ("experts", "sorted by length")}


def require_untouched(case: Case, batch: Batch, place: int, dtype: torch.dtype, **options: object) -> None:
    """The sum with the bad example is the sum without it.

    If the data choose the rows, a finite batch must come first: before that, it is refused.
    """
    model = case.build(dtype)
    clipper = attach(model, PerExample(max_norm=0.5, **options))
    try:
        clipped_sum(clipper, model, batch)
    except UnsupportedModelError as refusal:
        assert case.name in MOVED and "not finite" in str(refusal)
    clipped_sum(clipper, model, drawn(case, dtype))
    with_it, without_it = (clipped_sum(clipper, model, b) for b in (batch, batch.without(place)))
    assert distance(with_it, without_it) <= 1e-6
    assert distance(without_it, {n: torch.zeros_like(t) for n, t in without_it.items()}) > 1e-3


@pytest.mark.parametrize(
    ("factor", "dtype"), [(torch.nan, torch.float32), (torch.inf, torch.float32), (-torch.inf, torch.float64)]
)
@BY_NAME
def test_a_loss_that_is_not_finite(case: Case, factor: float, dtype: torch.dtype) -> None:
    require_untouched(case, drawn(case, dtype).distorted(1, "none", factor), 1, dtype)


@pytest.mark.parametrize("distortion", ["nan", "inf", "some inf"])
@FLOATING
def test_inputs_that_are_not_finite(case: Case, distortion: str) -> None:
    batch = drawn(case, torch.float32).distorted(2, distortion, 1.0)
    try:
        require_untouched(case, batch, 2, torch.float32)
        require_untouched(case, batch, 2, torch.float32, parts="tensor", mode="normalize")
    except UnsupportedModelError as refusal:  # an operation that saves its inputs in an unknown form
        assert case.fallback and "not finite" in str(refusal)


@FLOATING
def test_the_loop_isolates_a_bad_example_too(case: Case) -> None:
    batch = drawn(case, torch.float64).distorted(2, "nan", 1.0)
    if case.name not in MOVED:  # the loop does not learn the layout of rows
        require_untouched(case, batch, 2, torch.float64, method="loop")


@FLOATING
def test_a_gradient_that_overflows_though_the_loss_does_not(case: Case) -> None:
    """Inputs and loss are finite; the gradient or its square overflows float32."""
    batch = drawn(case, torch.float32).distorted(0, "none", 3e37)
    require_untouched(case, batch, 0, torch.float32)


@BY_NAME
def test_every_example_is_bad(case: Case) -> None:
    model = case.build(torch.float32)
    batch = Batch(case.draw(SIZE, torch.float32), torch.full((SIZE,), torch.nan))
    total = clipped_sum(attach(model, PerExample()), model, batch)
    assert all(not t.any() for t in total.values())


@BY_NAME
def test_nothing_is_kept_from_norms_to_sums(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that are computed twice are zeroed the second time as well."""
    monkeypatch.setattr(examples, "KEEP_BYTES", 0)
    require_untouched(case, drawn(case, torch.float32).distorted(3, "none", torch.nan), 3, torch.float32)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("time", [4, 8])
def test_a_non_finite_example_hides_no_layout(time: int, method: str) -> None:
    """[T, B, d] with T a multiple of B: one NaN example is in every row of the wrong axis."""
    torch.manual_seed(0)
    model, x = nn.LayerNorm(3), torch.randn(4, time, 3)

    def total(x: Tensor) -> dict[str, Tensor]:
        h = model(x.transpose(0, 1)).transpose(0, 1)
        clipper = attach(model, PerExample(method=method))
        return clipper.clipped_sum((h * torch.arange(1, 4)).tanh().flatten(1).sum(1))

    expected = total(x[1:])
    x[0] = torch.nan
    assert distance(total(x), expected) <= 1e-6
    assert expected["weight"].any()


class Saturated(nn.Module):
    """An unknown operation on infinite inputs with finite outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(2, 2, 3)
        nn.init.uniform_(self.layer.weight, 0.1, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.mT, x.mT).tanh()


@pytest.mark.filterwarnings("ignore::clipwise.gradients.FallbackWarning")
def test_an_infinite_input_with_finite_loss_and_output_gradient() -> None:
    """Only the saved tensor is infinite, and its example is unknown; the others are unaffected."""
    torch.manual_seed(0)
    model, x = Saturated(), torch.randn(4, 2, 5)
    clipper = attach(model, PerExample(max_norm=0.01))
    expected = clipper.clipped_sum(model(x[1:]).flatten(1).sum(1))
    x[0] = torch.inf
    losses = model(x).flatten(1).sum(1)
    assert torch.isfinite(losses).all()
    assert distance(clipper.clipped_sum(losses), expected) <= 0.01 * (1 + 1e-5)
    assert expected["layer.weight"].norm() > 0.01


@pytest.mark.filterwarnings("ignore::clipwise.gradients.FallbackWarning")
def test_user_tensors_are_unchanged() -> None:
    """A fallback restores what it clears during its calls."""
    case = next(c for c in CASES if c.name == "custom function")
    model, (x,) = case.build(torch.float32), case.draw(SIZE, torch.float32)
    x[1] = torch.inf
    before = x.clone(), {n: p.detach().clone() for n, p in trainable(model).items()}
    clipped_sum(attach(model, PerExample()), model, Batch((x,), torch.ones(SIZE)))
    assert torch.equal(x, before[0])
    assert all(torch.equal(p, before[1][n]) for n, p in trainable(model).items())
