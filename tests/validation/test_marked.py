"""Marked batches behave like ordinary tensors, and the graph shows their use."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipwise.errors import CoupledExamplesError
from clipwise.validation.marked import MarkedTensor, Trace, plain, tracked
from tests.runs import FEATURES, data, network, private_run

B, D = 6, 4


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(B, D), torch.randint(0, 3, (B,))


def saved(value: Tensor) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer)


READS: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda x: x.numpy(),
    "asarray": np.asarray,
    "numpy of a part": lambda x: x[1:, None].numpy(),
    "list": lambda x: x.tolist(),
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.sum()),
    "truth": lambda x: bool((x == x).all()),
    "index": lambda x: list(range(10))[int(x.abs().sum()) % 10],
    "text": lambda x: f"{x} {x.sum():.3f} {x!r}",
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "saved": saved,
    "dlpack": lambda x: torch.from_dlpack(x),
    "detached": lambda x: x.detach().clone().numpy(),
    "out": lambda x: torch.add(x, 1, out=torch.empty_like(x)).numpy(),
    "facts": lambda x: (x.requires_grad, x.is_leaf, x.grad_fn, x.shape, x.dtype, x.device),
    "collated": lambda x: torch.utils.data.default_collate([x[0], x[1]]).numpy(),
    "filled": lambda x: filled(torch.zeros(B, *x.shape[1:]), x).numpy(),
    "copied": lambda x: torch.zeros(x.shape).copy_(x).numpy(),
    "evaluated": lambda x: evaluated(x).numpy(),
}


def filled(target: Tensor, x: Tensor) -> Tensor:
    target[:] = x
    return target


@torch.no_grad()
def evaluated(x: Tensor) -> Tensor:
    return network()(F.pad(x.float().view(B, -1), (0, FEATURES))[:, :FEATURES])


@pytest.mark.parametrize("place", [0, 1], ids=["floats", "integers"])
@pytest.mark.parametrize("how", READS)
def test_reading_gives_what_an_ordinary_tensor_gives(how: str, place: int) -> None:
    ordinary = batch()[place]
    marked = Trace().mark(ordinary)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.manual_seed(0)
        expected = READS[how](ordinary)
        torch.manual_seed(0)
        found = READS[how](marked)
    assert not isinstance(found, MarkedTensor)
    if isinstance(expected, (Tensor, np.ndarray)):
        assert type(found) is type(expected) and np.array_equal(np.asarray(found), np.asarray(expected))
    else:
        assert found == expected


def gradient_of(use: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the gradient at marked inputs, through `use` and a layer."""
    trace = Trace()
    x, _ = trace.mark(batch())
    outputs = nn.Linear(D, 2)(use(x))
    assert type(outputs) is Tensor and outputs.requires_grad
    (found,) = torch.autograd.grad(outputs.square().sum(), trace.inputs)
    return found


def required(x: Tensor) -> Tensor:
    x.requires_grad = True
    assert x.requires_grad
    return x


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


USES: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda x: x,
    "in place": lambda x: x.mul_(2).add_(1),
    "assigned to": lambda x: filled(x, x * 2),
    "required": required,
    "a required view": lambda x: required(x[:, None]).squeeze(1),
    "a required copy": lambda x: x.clone().requires_grad_(),
    "not required": lambda x: x.requires_grad_(False),
    "a function": lambda x: Doubled.apply(x),
    "mapped": lambda x: torch.func.vmap(lambda row: row * 2)(x),
    "in another type": lambda x: x.double().float(),
    "joined": lambda x: torch.cat([x[:2], x[2:]]),
    "filled in": lambda x: filled(torch.zeros(B, D), x),
}


@pytest.mark.parametrize("how", USES)
def test_the_graph_shows_where_inputs_go(how: str) -> None:
    assert gradient_of(USES[how]).abs().sum(1).all()


def test_a_tensor_with_parameters_written_into_it_requires_a_gradient() -> None:
    x, _ = Trace().mark(batch())
    layer = nn.Linear(D, 2)
    out = x.new_zeros(B, 2)
    assert type(out) is Tensor
    out[x[:, 0] > 0] = layer(x[x[:, 0] > 0])
    assert type(out) is Tensor and out.requires_grad
    part = x[:, :2].clone()
    part[:3] = layer(x[:3])
    assert type(part) is Tensor and part.requires_grad
    view = x[:, :2].clone()
    view[:3].copy_(layer(x[:3]))
    assert type(tracked(view)) is Tensor and view.requires_grad


def test_a_marked_batch_shares_memory_with_the_original() -> None:
    x, y = batch()
    marked_x, marked_y = Trace().mark((x, y))
    assert marked_x.data_ptr() == x.data_ptr() and marked_y.data_ptr() == y.data_ptr()
    assert type(x) is type(y) is Tensor and not x.requires_grad
    assert type(plain(marked_x)) is Tensor and not plain(marked_x).requires_grad


def test_copies_in_user_tensors_keep_no_graph() -> None:
    buffer = torch.zeros(B, D)
    for _ in range(3):
        trace = Trace()
        x, _ = trace.mark(batch())
        buffer.copy_(x)
        assert type(buffer) is Tensor and not buffer.requires_grad


def test_user_code_may_treat_every_batch_of_a_run_as_data() -> None:
    model, private = private_run(probe_independence=True)
    for _ in range(2):
        for x, y in private.loader:
            assert not x.requires_grad and x.is_leaf
            np.asarray(x), x.numpy(), y.numpy()
            hidden = x[:, None]
            hidden.requires_grad = True
            private.step(F.cross_entropy(model(hidden.squeeze(1)), y, reduction="none"))
    assert private.steps == 10
    assert all(type(p.grad) is Tensor for p in model.parameters())


def test_coupling_hidden_at_first_is_refused_before_its_release() -> None:
    """A zero head and a learning rate that starts at 0 hide the coupling for some steps."""
    model = network()
    nn.init.zeros_(model[2].weight)
    nn.init.zeros_(model[2].bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    _, private = private_run(model, optimizer, dataset=data(), sampling="full")

    def step() -> None:
        for x, y in private.loader:
            private.step(F.cross_entropy(model(x - x.mean(0)), y, reduction="none"))

    for _ in range(6):
        step()
    optimizer.param_groups[0]["lr"] = 0.1
    step()  # the head is still zero, and moves now
    assert private.steps == 7
    with pytest.raises(CoupledExamplesError):
        step()
    assert private.steps == 7


@pytest.mark.parametrize("is_branch", [False, True])
def test_an_auxiliary_loss_that_ramps_up_is_refused_before_its_release(is_branch: bool) -> None:
    model, private = private_run(sampling="full")

    def step(weight: float) -> None:
        for x, y in private.loader:
            h = model(x)
            losses = F.cross_entropy(h, y, reduction="none")
            if weight or not is_branch:
                losses = losses + weight * (h - h.mean(0)).square().sum(1)
            private.step(losses)

    for _ in range(8):
        step(0.0)
    with pytest.raises(CoupledExamplesError):
        step(1e-3)
    assert private.steps == 8


def test_losses_of_pairs_are_refused_before_a_release() -> None:
    model = nn.Linear(FEATURES, 1)
    _, private = private_run(model, sampling="full")
    for x, y in private.loader:
        with pytest.raises(CoupledExamplesError, match="pair of examples"):
            private.step((model(x) - y).square().flatten(1).sum(1))
        break
    assert private.steps == 0
