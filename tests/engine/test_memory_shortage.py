"""A batch that does not fit into memory is gathered in smaller pieces: the same sum, one release."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clipwise import Batch, PerExample, Quantile
from clipwise.engine.memory_shortage import is_out_of_memory, with_smaller_pieces
from clipwise.sampling.augmentation import Views
from tests.runs import data, gradients, losses_of, network, private_run


def test_what_counts_as_a_shortage() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))


def test_pieces_are_halved_until_they_fit() -> None:
    tried = []

    def gather(size: int) -> int:
        tried.append(size)
        if size > 3:
            raise torch.OutOfMemoryError
        return size

    assert with_smaller_pieces(gather, 20) == 3
    assert tried == [10, 5, 3]


def test_one_example_that_does_not_fit_is_an_error() -> None:
    def gather(size: int) -> int:
        raise torch.OutOfMemoryError("too large")

    with pytest.raises(torch.OutOfMemoryError, match="too large"):
        with_smaller_pieces(gather, 8)


def released(most: int, **options: Any) -> tuple[dict[str, Tensor], int, list[int]]:
    """The gradients of one compiled step where at most `most` rows fit into memory, the count, and what was tried."""
    tried: list[int] = []
    model, private = private_run(
        network(torch.float64), dataset=data(dtype=torch.float64), sampling="fixed-size", seed=0, **options
    )

    def loss(x: Tensor, y: Tensor) -> Tensor:
        if torch.is_grad_enabled() and isinstance(model[0].weight, nn.Parameter):  # no replacement test
            tried.append(len(x))
        if len(x) > most:
            raise torch.OutOfMemoryError("no memory")
        return losses_of(model, (x, y))

    private.compiled(loss)(*next(iter(private.loader)))
    return gradients(model), private.steps, tried


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clipping": PerExample(0.5, parts="layer")},
        {"clipping": PerExample(Quantile(count_noise=1.0))},
        {"augmentation": Views(2)},
    ],
)
def test_smaller_pieces_give_the_same_release(options: dict[str, Any]) -> None:
    rows = 2 if "augmentation" in options else 1
    whole, _, _ = released(100, **options)
    found, steps, tried = released(3 * rows, **options)
    assert steps == 1 and tried == [8 * rows, 4 * rows, 2 * rows, 2 * rows, 2 * rows, 2 * rows]
    torch.testing.assert_close(found, whole, rtol=1e-10, atol=1e-12)


def test_whole_microbatches_are_not_cut() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        released(3, clipping=Batch(1.0))


def test_a_loop_of_ones_own_gets_the_error_and_can_continue() -> None:
    model, private = private_run(sampling="fixed-size")
    batch = next(iter(private.loader))
    clip = private._context.clipper.clipped_sum

    def fails(*_: object) -> Any:
        raise torch.OutOfMemoryError("no memory")

    private._context.clipper.clipped_sum = fails  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError):
        private.step(losses_of(model, batch))
    assert private.steps == 0 and not gradients(model)
    private._context.clipper.clipped_sum = clip  # type: ignore[method-assign]
    assert private.step(losses_of(model, batch)) and private.steps == 1


def test_what_was_charged_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from clipwise.noise import mechanism

    model, private = private_run(sampling="fixed-size")

    def fails(*_: object, **__: object) -> Any:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(mechanism, "add_gaussian", fails)
    with pytest.raises(torch.OutOfMemoryError):
        private.compiled(lambda x, y: losses_of(model, (x, y)))(*next(iter(private.loader)))
    assert private.steps == 1 and not gradients(model)
