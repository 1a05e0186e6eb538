"""Mixtures of experts with buffers: the whole batch shares the slots, or each example has its own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clipwise import make_private
from clipwise.errors import CoupledExamplesError
from clipwise.gradients import METHODS, Memory, per_example_gradients
from tests.gradients.cases import losses, oracle, trainable

D, T, EXPERTS = 4, 3, 2


class Dispatched(nn.Module):
    """GShard: a one-hot mask sends tokens to slots of the experts' buffers, and another sends them back."""

    def __init__(self, groups_of: str) -> None:
        super().__init__()
        self.groups_of = groups_of
        self.gate, self.head = nn.Linear(D, EXPERTS, bias=False), nn.Linear(D, 2)
        self.inside = nn.Parameter(torch.randn(EXPERTS, D, 5))
        self.outside = nn.Parameter(torch.randn(EXPERTS, 5, D))

    def forward(self, x: Tensor) -> Tensor:
        tokens_gsm = x if self.groups_of == "example" else x.reshape(1, -1, D)
        share_gs, expert_gs = self.gate(tokens_gsm).softmax(-1).max(-1)
        chosen_gse = F.one_hot(expert_gs, EXPERTS).to(x)
        place_gs = ((chosen_gse.cumsum(1) - 1) * chosen_gse).sum(-1).long()
        capacity = tokens_gsm.shape[1]  # nothing is dropped
        place_gsc = F.one_hot(place_gs, capacity).to(x)
        combine = torch.einsum("gs,gse,gsc->gsec", share_gs, chosen_gse, place_gsc)
        buffer = torch.einsum("gsec,gsm->egcm", (combine > 0).to(x), tokens_gsm)
        hidden = torch.einsum("egcm,emh->egch", buffer, self.inside).relu()
        out = torch.einsum("gsec,egcm->gsm", combine, torch.einsum("egch,ehm->egcm", hidden, self.outside))
        return self.head(out.view(x.shape) + x)


def rows(batch: int, seed: int, marked: bool = False) -> tuple[Tensor]:
    x = torch.randn(batch, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return (x.requires_grad_(marked),)


@pytest.mark.parametrize("method", METHODS)
def test_a_group_for_each_example_is_exact(method: str) -> None:
    torch.manual_seed(0)
    model, memory = Dispatched("example").double(), Memory()
    for seed, batch in enumerate((6, 6, 4, 7, 5)):
        inputs = rows(batch, seed, marked=seed < 2)
        found = per_example_gradients(losses(model, inputs), trainable(model), memory, method)
        squares, truth = found.squared_norms(), oracle(model, rows(batch, seed))
        for name, g in truth.items():
            torch.testing.assert_close(squares[name], g.flatten(1).square().sum(1))


@pytest.mark.parametrize("method", ["auto", "reweight", "instantiate"])
@pytest.mark.parametrize("marked", [True, False])
def test_a_group_of_the_whole_batch_is_refused_for_its_buffer(marked: bool, method: str) -> None:
    """On the first batch with gradients at the inputs; otherwise once the buffer has grown with the batch."""
    torch.manual_seed(0)
    model, memory = Dispatched("batch").double(), Memory()
    with pytest.raises(CoupledExamplesError, match=r"BmmBackward0.* share one buffer.*capacity"):
        for seed, batch in enumerate((6, 5, 7, 4)):
            found = per_example_gradients(losses(model, rows(batch, seed, marked)), trainable(model), memory, method)
            assert not marked
            truth = oracle(model, rows(batch, seed))  # exact until then
            for name, square_B in found.squared_norms().items():
                torch.testing.assert_close(square_B, truth[name].flatten(1).square().sum(1))


def test_a_run_raises_as_well() -> None:
    torch.manual_seed(0)
    model = Dispatched("batch")
    data = TensorDataset(torch.randn(24, T, D))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = make_private(model, optimizer, data, batch_size=8, noise_multiplier=1.0, seed=2)
    with pytest.raises(CoupledExamplesError, match="share one buffer"):
        for (x,) in private.loader:
            private.step(losses(model, (x,)))


def test_a_batch_mean_is_refused_with_its_own_message() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(D, D), nn.Linear(D, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            return self.second(h - h.mean(0))

    with pytest.raises(CoupledExamplesError, match=r"belongs to several examples.*batch statistics"):
        model = Centred().double()
        per_example_gradients(losses(model, rows(6, 0, True)), trainable(model), Memory())


class Grouped(nn.Module):
    """Rows sorted by expert, products with the weights of all experts at once, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.head = nn.Linear(D, EXPERTS), nn.Linear(D, 2)
        self.weight = nn.Parameter(torch.randn(EXPERTS, D, D))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        share, expert = self.gate(rows).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        offsets = torch.bincount(expert, minlength=EXPERTS).cumsum(0).int()
        made = F.grouped_mm(rows[order], self.weight, offs=offsets) * share[order, None]
        return self.head(made[order.argsort()].view(x.shape) + x)


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="needs torch.nn.functional.grouped_mm")
def test_grouped_products_are_exact_and_have_a_rule() -> None:
    torch.manual_seed(0)
    model, memory = Grouped(), Memory()
    for seed, batch in enumerate((6, 6, 5, 7, 6)):
        inputs = (rows(batch, seed)[0].float(),)
        found = per_example_gradients(losses(model, inputs), trainable(model), memory)
        squares, written = found.squared_norms(), found.instantiate(slice(0, batch))
        alone = [torch.autograd.grad(losses(model, (x[None],))[0], list(trainable(model).values())) for x in inputs[0]]
        for name, gradients in zip(trainable(model), zip(*alone, strict=True), strict=True):
            g = torch.stack(gradients)
            torch.testing.assert_close(written[name], g, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(squares[name].sqrt(), g.double().flatten(1).norm(dim=1), rtol=1e-4, atol=1e-5)
    assert not memory.fallbacks
