"""Public statistics of one or several parts of a model in one run, matched by parameter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clipwise import PerExample, Private, make_private
from clipwise.errors import ConfigurationError
from clipwise.layers import PublicBatchNorm, PublicStatistics, replace_batchnorm
from clipwise.layers.public_statistics import AllPublicStatistics

SIZE, FEATURES, WIDTH = 16, 6, 8


def rows(count: int, seed: int) -> Tensor:
    return torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(seed)).double()


def encoder(kind: str = "public-exact", seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    inner = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()).double()
    nn.init.normal_(inner[1].weight)
    replaced, _ = replace_batchnorm(inner, rows(12, 50 + seed), kind)
    assert isinstance(replaced, nn.Sequential)
    return replaced


class Two(nn.Module):
    """Two encoders, each with its own public rows."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = encoder(), encoder(seed=1)
        self.head = nn.Linear(2 * WIDTH, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.one(x), self.other(x.flip(1))], 1))


def wrapped() -> nn.Module:
    inner = encoder()
    return nn.Sequential(inner, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)).double()


def run(model: nn.Module) -> Private:
    y = torch.arange(SIZE) % 3
    return make_private(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        TensorDataset(rows(SIZE, 1), y),
        clipping=PerExample(1e9),
        sampling="full",
        noise_multiplier=0,
    )


def through(inner: nn.Sequential, x: Tensor, public: Tensor) -> Tensor:
    """The encoder with public moments as functions of the weights, in an independent implementation."""
    linear, norm = inner[0], inner[1]
    h, p = linear(x), linear(public)
    normal = (h - p.mean(0)) * (p.var(0, correction=0) + norm.eps).rsqrt()
    return torch.tanh(normal * norm.weight + norm.bias)


def forward_through(model: nn.Module, x: Tensor) -> Tensor:
    if isinstance(model, Two):
        parts = [through(model.one, x, rows(12, 50)), through(model.other, x.flip(1), rows(12, 51))]
        return model.head(torch.cat(parts, 1))
    return model[2](model[1](through(model[0], x, rows(12, 50))))


@pytest.mark.parametrize(("build", "biases"), [(wrapped, ["0.0.bias"]), (Two, ["one.0.bias", "other.0.bias"])])
def test_gradients_include_the_public_statistics(build: object, biases: list[str]) -> None:
    model: nn.Module = build()  # type: ignore[operator]
    private = run(model)
    x, y = next(iter(private.loader))
    private.backward(F.cross_entropy(model(x), y, reduction="none"))
    found = {name: p.grad for name, p in model.named_parameters()}
    loss = F.cross_entropy(forward_through(model, x.detach()), y)
    expected = dict(zip(found, torch.autograd.grad(loss, list(model.parameters())), strict=True))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    for name in biases:  # a bias before a norm has no effect at all
        assert float(found[name].abs().max()) < 1e-12


def test_a_run_follows_all_of_them() -> None:
    model = Two()
    private = run(model)
    for _ in range(2):
        for x, y in private.loader:
            private.step(F.cross_entropy(model(x), y, reduction="none"))
    assert all(s.is_fresh for s in PublicStatistics.all_of(model))
    assert "24 rows, for the statistics" in str(private.statement())
    assert AllPublicStatistics(model).describe() == {
        "rows": 24,
        "kinds": {"one.1": "public-exact", "other.1": "public-exact"},
    }
    with pytest.raises(ConfigurationError, match="2 public statistics"):
        PublicStatistics.of(model)


def test_a_scale_that_is_not_trained_is_refused_before_anything_is_released() -> None:
    frozen = wrapped()
    frozen[0][1].weight.requires_grad_(False)
    with pytest.raises(ConfigurationError, match=r"'1'.*weight of its own that is trained"):
        run(frozen)
    whole = nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
    replace_batchnorm(whole, rows(12, 3), "public-exact")
    with pytest.raises(ConfigurationError, match=r"'3'.*train the whole model"):
        run(whole[:2])


def test_a_scale_that_another_part_of_the_model_shares_is_refused() -> None:
    model = wrapped()
    model[1].weight = model[0][1].weight
    with pytest.raises(ConfigurationError, match=r"'1'.*weight of its own"):
        run(model)


def test_a_model_without_public_statistics_is_unaffected() -> None:
    none = AllPublicStatistics(nn.Linear(2, 2))
    assert not none
    none.refresh(force=True)
    none.require_correctable({})
    released = {"weight": torch.ones(1)}
    assert none.correct(released, {}) is released


def test_a_layer_without_public_rows_is_named_before_anything_is_drawn() -> None:
    model = nn.Sequential(nn.Linear(3, 4), PublicBatchNorm(4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match=r"Layer '1' \(PublicBatchNorm\) has no public statistics"):
        make_private(model, optimizer, TensorDataset(torch.randn(8, 3)), batch_size=2, noise_multiplier=1.0)
