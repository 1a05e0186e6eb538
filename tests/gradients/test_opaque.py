"""Compiled and reentrant parts of a model are refused by name if per-example gradients are inaccessible."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from clipwise import Batch, PerExample, Private, make_private
from clipwise.errors import UnsupportedModelError
from clipwise.validation.marked import Trace

ROWS = TensorDataset(torch.randn(12, 1, 5), torch.arange(12) % 3)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Network(nn.Module):
    """The compiled region begins after the first layer, which takes the marked inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Flatten(), nn.Linear(5, 4))
        self.second = nn.Sequential(nn.GELU(), nn.LayerNorm(4), nn.Linear(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        scores: Tensor = self.second(h)
        return scores


def compiled_run(clipping: PerExample | Batch) -> tuple[Private, nn.Module]:
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = make_private(model, optimizer, ROWS, sampling="full", noise_multiplier=1.0, clipping=clipping, seed=1)
    return private, torch.compile(model, backend="aot_eager")  # type: ignore[return-value]


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["auto", "loop"])
def test_a_compiled_model_is_refused_by_name(method: str) -> None:
    private, compiled = compiled_run(PerExample(method=method))
    for size in (7, 5):  # with dynamic sizes it frees its buffers in the first backward pass
        compiled(Trace().mark(ROWS.tensors[0][:size]))
    x, y = next(iter(private.loader))
    with pytest.raises(UnsupportedModelError, match=r"torch\.compile.*private\.compiled"):
        private.step(losses(compiled, x, y))
    assert private.steps == 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["auto", "bookkeeping", "reweight", "instantiate"])
def test_a_region_that_allows_two_backward_passes_is_refused_too(method: str) -> None:
    private, compiled = compiled_run(PerExample(method=method))
    x, y = next(iter(private.loader))
    with (
        torch._functorch.config.patch(donated_buffer=False),
        pytest.raises(UnsupportedModelError, match=r"torch\.compile"),
    ):
        private.step(losses(compiled, x, y))


def test_a_compiled_function_of_the_data_is_accepted() -> None:
    """It contains no parameter, so no per-example gradient is needed inside it."""
    private, compiled = compiled_run(PerExample())
    scaled = torch.compile(lambda x: (x - 1) / 2, backend="aot_eager")
    model = compiled._orig_mod
    assert isinstance(model, nn.Module)
    for x, y in private.loader:
        private.step(losses(model, scaled(x), y))
    assert private.steps == 1


def test_batch_takes_a_compiled_model() -> None:
    released = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        private, compiled = compiled_run(Batch())
        model = compiled if is_compiled else compiled._orig_mod
        assert isinstance(model, nn.Module)
        for x, y in private.loader:
            private.backward(losses(model, x, y))
        released.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    torch.testing.assert_close(released[0], released[1])


@pytest.mark.parametrize("clipping", [PerExample(), PerExample(method="loop"), Batch()], ids=repr)
def test_reentrant_checkpointing_is_refused_by_name(clipping: PerExample | Batch) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(5, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = checkpoint(self.inner, x.flatten(1).requires_grad_(), use_reentrant=True)
            scores: Tensor = self.outer(hidden)
            return scores

    model = Checkpointed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = make_private(model, optimizer, ROWS, sampling="full", noise_multiplier=1.0, clipping=clipping)
    x, y = next(iter(private.loader))
    with pytest.raises(UnsupportedModelError, match="use_reentrant=False"):
        private.step(losses(model, x, y))
