"""Complex parameters count as pairs of real ones: clips, sensitivity, the split of the noise, and the noise."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clipwise import Backprop, Batch, Lipschitz, PerExample, Private, Quantile, make_private
from clipwise.clipping import Strategy
from clipwise.contrib import Sparse
from clipwise.errors import ConfigurationError, UnsupportedModelError
from clipwise.gradients.real_views import complex_view, dimension, real_view
from clipwise.noise.key import NoiseKey
from clipwise.noise.mechanism import noised_sums
from clipwise.privacy import Part
from tests.soundness.neighbours import attach

N = 12
ROWS = TensorDataset(torch.randn(N, 4, generator=torch.Generator().manual_seed(3)))


class Mixed(nn.Module):
    """A real layer of an odd number of entries, and a complex one: as such, or as pairs of real numbers."""

    def __init__(self, pairs: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first = nn.Parameter(torch.randn(3, generator=generator, dtype=dtype))
        z = torch.randn(3, 4, 2, generator=generator, dtype=dtype)
        self.z = nn.Parameter(z if pairs else torch.view_as_complex(z))

    def forward(self, x: Tensor) -> Tensor:
        z = self.z if self.z.is_complex() else torch.view_as_complex(self.z)
        h = torch.complex(x, x.square()) @ z.mT
        return (h.abs() * self.first).sum(1) + h.imag.square().sum(1)


def run(clipping: Strategy | None = None, model: nn.Module | None = None, **options: Any) -> Private:
    model = model or Mixed()
    options = {"noise_multiplier": 1.0, "batch_size": 4, "seed": 1} | options
    return make_private(model, torch.optim.Adam(model.parameters(), lr=0.1), ROWS, clipping=clipping, **options)


def trained(private: Private) -> nn.Module:
    model = private._context.model
    for (x,) in private.loader:
        private.step(model(x))
    return model


def test_views() -> None:
    z = torch.randn(3, 2, dtype=torch.complex64)
    assert dimension(z) == 12 and dimension(z.real) == 6
    assert torch.equal(complex_view(real_view(z.conj())), z.conj())
    shifted = torch.randn(13)[1:].view(3, 2, 2)
    assert torch.equal(real_view(complex_view(shifted)), shifted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("clipping", [PerExample(0.1), PerExample(0.1, parts="layer"), Batch(0.1)], ids=str)
def test_clipped_sums_are_those_of_the_pairs(clipping: Strategy, dtype: torch.dtype) -> None:
    x = ROWS.tensors[0].to(dtype)
    model, pairs = Mixed(dtype=dtype), Mixed(True, dtype)
    found = attach(model, clipping).clipped_sum(model(x))
    expected = attach(pairs, clipping).clipped_sum(pairs(x))
    assert found["z"].is_complex()
    for name in expected:
        torch.testing.assert_close(real_view(found[name]), expected[name])


def test_one_example_moves_a_sum_by_no_more_than_the_clip() -> None:
    x = ROWS.tensors[0]
    model = Mixed()
    for strategy in (PerExample(0.1), Batch(0.1)):
        clipper = attach(model, strategy)
        for i in range(N):
            total = clipper.clipped_sum(model(x[i : i + 1] * 100))
            length = math.sqrt(sum(float(real_view(t).double().square().sum()) for t in total.values()))
            assert 0.099 < length <= 0.1 * (1 + 1e-6)


@pytest.mark.parametrize("grid", [0.0, 2.0**-20])
def test_noise_falls_on_real_and_imaginary_parts_alike(grid: float) -> None:
    if grid:
        pytest.importorskip("cryptography")
    n = 20_000
    parts = (Part("all", ("a", "z"), 1.0, 3.0, grid=grid),)
    total = {"a": torch.zeros(3), "z": torch.zeros(n, dtype=torch.complex64)}
    z = noised_sums(total, parts, 2.0, NoiseKey(b"k" * 32))["z"]
    assert z.dtype == torch.complex64 and z.shape == (n,)
    for part in (z.real, z.imag):
        assert abs(float(part.std()) / 1.5 - 1) < 5 / math.sqrt(2 * n)
        assert abs(float(part.mean())) < 5 * 1.5 / math.sqrt(n)
    assert abs(float((z.real * z.imag).mean())) < 5 * 1.5**2 / math.sqrt(n)


@pytest.mark.parametrize("noise", ["standard", "secure"])
@pytest.mark.parametrize("split", ["optimal", "equal"])
def test_sensitivities_and_noise_are_those_of_the_pairs(split: str, noise: str) -> None:
    if noise == "secure":
        pytest.importorskip("cryptography")
    found, expected = (
        run(PerExample(parts="layer", split=split), Mixed(pairs), noise=noise).parts() for pairs in (False, True)
    )
    assert found == expected


@pytest.mark.parametrize("noise", ["standard", "secure"])
@pytest.mark.parametrize(
    "clipping",
    [PerExample(), PerExample(Quantile(count_noise=1.0), parts="layer"), Batch(), PerExample(method="loop")],
    ids=str,
)
def test_a_run_trains_and_states_its_guarantee(clipping: Strategy, noise: str) -> None:
    if noise == "secure":
        pytest.importorskip("cryptography")
    private = run(clipping, noise=noise, ema=0.9, steps=3, delta=1e-5)
    before = private._context.model.z.detach().clone()
    model = trained(private)
    assert model.z.grad is not None and model.z.grad.is_complex() and model.z.dtype == before.dtype
    moved = model.z.detach() - before
    assert bool(moved.real.ne(0).all()) and bool(moved.imag.ne(0).all())
    assert private.spent().epsilon > 0 and str(private.statement())
    with private.ema.applied():
        assert model.z.is_complex() and bool(torch.isfinite(model.z).all())


@pytest.mark.parametrize(
    ("clipping", "name"),
    [
        (Backprop(1.0, 1.0), "Backprop"),
        (Lipschitz(1.0, 1.0), "Lipschitz"),
        (PerExample(sparse=Sparse()), "PerExample"),
        (Batch(sparse=Sparse()), "Batch"),
    ],
    ids=str,
)
def test_strategies_for_real_parameters_refuse_them_by_name(clipping: Strategy, name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"'z' is torch.complex64, and clipping={name}"):
        run(clipping)


def test_a_compiled_step_is_an_ordinary_one() -> None:
    private = run()
    step = private.compiled(lambda x: private._context.model(x))
    for (x,) in private.loader:
        step(x)
    assert private.steps > 0


def test_a_change_of_the_imaginary_part_in_a_forward_pass_is_found() -> None:
    """As any change of a tensor that a model keeps."""

    class Learning(Mixed):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kept", torch.zeros(2, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            self.kept.data.imag += x.mean()
            return super().forward(x)

    private = run(model=Learning())
    with pytest.raises(UnsupportedModelError, match="kept"):
        trained(private)
