"""An empty batch is a step like any other, and needs no forward pass: many models cannot run on zero rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clipwise import Backprop, Batch, Lipschitz, PerExample, Quantile, layers
from clipwise.errors import StepError
from tests.runs import FEATURES, SIZE, gradients, losses_of, network, parameters, private_run, same

RARE = 0.01  # about two of three batches of 40 records are empty


class Reshapes(nn.Module):
    """As a network whose reshape infers a size: it cannot run on zero rows."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        assert len(x), "cannot reshape a tensor of 0 elements"
        return self.inner(x)


def options_of(kind: str) -> dict[str, Any]:
    inner = network()
    if kind == "lipschitz":
        inner = nn.Sequential(layers.ClipInput(1.0), *inner)
        return {"model": inner, "clipping": Lipschitz(1.0, input_norm=1.0)}
    if kind == "backprop":
        return {"model": layers.clip_inputs(inner, input_norm=1.0, grad_norm=1.0), "clipping": Backprop()}
    model = Reshapes(inner)
    strategies: dict[str, dict[str, Any]] = {
        "per example": {"clipping": PerExample()},
        "quantile": {"clipping": PerExample(max_norm=Quantile(target=0.5, count_noise=2.0))},
        "views": {"clipping": PerExample(), "augmentation_multiplicity": 2},
        "pieces": {"clipping": PerExample(), "max_physical_batch_size": 1},
        "batch": {"clipping": Batch(microbatches=4)},
        "users": {"clipping": Batch(), "group": [i // 2 for i in range(SIZE)]},
    }
    return {"model": model, **strategies[kind]}


KINDS = ("per example", "quantile", "views", "pieces", "batch", "users", "lipschitz", "backprop")


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_that_leaves_the_model_out_of_empty_batches(kind: str) -> None:
    model, private = private_run(**options_of(kind), sample_rate=RARE, seed=1)
    empty = 0
    for x, y in private.loader.pieces():
        outputs = model(x) if len(x) else None
        losses = None if outputs is None else F.cross_entropy(outputs, y, reduction="none")
        empty += outputs is None
        private.step(losses, outputs)
    assert empty > 0
    assert private.steps == len(private.loader)
    assert all(p.grad is not None and bool(p.grad.any()) for p in model.parameters())  # noise


@pytest.mark.parametrize("kind", ["per example", "quantile", "batch", "backprop"])
def test_no_losses_are_the_losses_of_an_empty_batch(kind: str) -> None:
    found = []
    for gives_losses in (True, False):
        options = options_of(kind)
        model = options.pop("model")
        model, private = private_run(getattr(model, "inner", model), **options, sample_rate=RARE, seed=1)
        for x, y in private.loader.pieces():
            losses = losses_of(model, (x, y)) if len(x) or gives_losses else None
            private.step(losses)
        found.append(parameters(model))
    # (Model and configuration are the same in both.)
    assert same(*found)


def test_a_batch_with_records_needs_its_losses() -> None:
    model, private = private_run()
    before = parameters(model)
    next(iter(private.loader))
    with pytest.raises(StepError, match="losses is None") as refusal:
        private.step(None)
    assert private.steps == 0 and same(parameters(model), before)
    assert not any(c.isdigit() for c in str(refusal.value))


def test_an_empty_batch_is_looked_after_like_any_other() -> None:
    model, private = private_run(sample_rate=1e-6)
    (x, _y) = next(iter(private.loader))
    assert len(x) == 0
    model.get_parameter("0.weight").grad = torch.ones(4, FEATURES)
    with pytest.raises(StepError, match="has a gradient that private"):
        private.step(None)
    assert private.steps == 0


def test_a_compiled_step_calls_no_loss_for_an_empty_batch() -> None:
    model, private = private_run(Reshapes(network()), sample_rate=RARE, seed=1)
    step = private.compiled(lambda x, y: F.cross_entropy(model(x), y, reduction="none"))
    sizes = [(step(x, y), len(x))[1] for x, y in private.loader]
    assert 0 in sizes and private.steps == len(sizes)
    assert gradients(model)
