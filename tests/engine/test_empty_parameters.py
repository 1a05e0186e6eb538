"""Parameters without entries: they get no noise and cause no error, or are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clipwise import Backprop, Batch, Lipschitz, PerExample, Private, Quantile, layers, make_private
from clipwise.clipping import Strategy
from clipwise.contrib import Adaptive, Multipliers, RandomLayer, ReleasedNorms, Sparse
from clipwise.errors import ConfigurationError
from clipwise.noise.secure.rounded import grid_step

ROWS = TensorDataset(torch.randn(12, 4, generator=torch.Generator().manual_seed(0)))


class WithEmpty(nn.Module):
    """A layer beside one without outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.none = nn.Linear(4, 3), nn.Linear(4, 0)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.linear(x), F.linear(x, self.none.weight, self.none.bias)], 1).square().sum(1)


def run(model: nn.Module, clipping: Strategy, **options: Any) -> Private:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return make_private(
        model, optimizer, ROWS, clipping=clipping, batch_size=4, noise_multiplier=1.0, seed=1, **options
    )


STRATEGIES: dict[str, Strategy] = {
    "one part": PerExample(),
    "per layer": PerExample(parts="layer"),
    "equal": PerExample(parts="layer", split="equal"),
    "weights": PerExample(parts="layer", split={"linear": 1.0, "none": 2.0}),
    "normalize": PerExample(parts="tensor", mode="normalize"),
    "quantile": PerExample(Quantile(count_noise=1.0), parts="layer"),
    "random layer": PerExample(parts=RandomLayer()),
    "adaptive": PerExample(parts=Adaptive(ReleasedNorms())),
    "multipliers": PerExample(parts=Multipliers(ReleasedNorms())),
    "sparse": PerExample(sparse=Sparse(every=10)),
    "loop": PerExample(method="loop"),
    "vmap": PerExample(method="vmap"),
    "reweight": PerExample(method="reweight"),
    "batch": Batch(),
    "batch per layer": Batch(parts="layer"),
}


@pytest.mark.parametrize("noise", ["standard", "secure"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_run_trains_beside_them(name: str, noise: str) -> None:
    if noise == "secure":
        pytest.importorskip("cryptography")
    torch.manual_seed(0)
    model = WithEmpty()
    private = run(model, STRATEGIES[name], noise=noise, ema=0.9)
    before = model.linear.weight.detach().clone()
    for (x,) in private.loader:
        private.step(model(x))
    step = private.compiled(lambda x: model(x))
    for (x,) in private.loader:
        step(x)
    assert not torch.equal(model.linear.weight, before)
    assert model.none.weight.grad is not None and model.none.weight.grad.shape == (0, 4)
    assert all(part.noise_std > 0 for part in private.parts())


def test_the_grid_of_an_empty_part_is_that_of_one_number() -> None:
    assert grid_step(1.0, 2.0, 0) == grid_step(1.0, 2.0, 1)


@pytest.mark.parametrize("name", ["Backprop", "Lipschitz"])
def test_strategies_that_bound_whole_layers_refuse_them_by_name(name: str) -> None:
    model = nn.Sequential(layers.ClipInput(1.0), nn.Linear(4, 0), nn.Linear(0, 2))
    strategy: Strategy = Lipschitz(1.0, 1.0)
    if name == "Backprop":
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 0), nn.Linear(0, 2))
        layers.clip_inputs(model, input_norm=1.0, grad_norm=1.0)
        strategy = Backprop()
    with pytest.raises(ConfigurationError, match=rf"'1\.\S*weight' is empty, which {name}"):
        run(model, strategy)
