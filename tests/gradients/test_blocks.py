"""Memory is reused only if nothing refers to it any more."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from clipwise.gradients.blocks import Blocks, Scratch

SHAPE = torch.Size((4, 8))
BYTES = SHAPE.numel() * 4


def take(blocks: Blocks, shape: torch.Size = SHAPE) -> Tensor:
    return blocks.take(shape, torch.float32)


def test_freed_memory_is_reused() -> None:
    blocks = Blocks(10 * BYTES)
    first = {take(blocks).data_ptr() for _ in range(3)}
    assert len(first) == 1
    assert take(blocks, torch.Size((8, 4))).data_ptr() in first


def test_a_step_uses_the_memory_of_the_previous_step() -> None:
    blocks = Blocks(10 * BYTES)
    steps = []
    for _ in range(3):
        kept = [take(blocks) for _ in range(5)]
        steps.append({t.data_ptr() for t in kept})
        del kept
    assert len(steps[0]) == 5
    assert steps[0] == steps[1] == steps[2]


@pytest.mark.parametrize("part", [lambda t: t[1:2], lambda t: t.view(-1), lambda t: t.detach(), lambda t: t.numpy()])
def test_memory_that_is_partly_in_use_is_not_reused(part: object) -> None:
    assert callable(part)
    blocks = Blocks(10 * BYTES)
    mine = take(blocks).fill_(1)
    rest = part(mine)
    del mine
    others = [take(blocks).fill_(2) for _ in range(4)]
    assert len({t.data_ptr() for t in others}) == 4
    assert (torch.as_tensor(rest) == 1).all()


def test_kept_memory_is_limited() -> None:
    blocks = Blocks(2 * BYTES)
    kept = [take(blocks) for _ in range(5)]
    assert len({t.data_ptr() for t in kept}) == 5
    assert blocks._bytes <= 2 * BYTES
    large = take(blocks, torch.Size((3, *SHAPE)))
    assert large.shape == (3, *SHAPE)
    assert blocks._bytes <= 2 * BYTES


def test_unused_sizes_are_freed() -> None:
    blocks = Blocks(2 * BYTES)
    take(blocks)
    half = torch.Size((2, 8))
    for _ in range(2):
        kept = [take(blocks, half) for _ in range(3)]
        del kept
    first = take(blocks, half).data_ptr()
    assert take(blocks, half).data_ptr() == first


def test_scratch_is_one_buffer_as_large_as_its_largest_use() -> None:
    scratch = Scratch(10 * BYTES)
    small, large = torch.zeros(2, 3), torch.zeros(5, 7, dtype=torch.float64)
    place = scratch.like(large).data_ptr()
    for t in (small, large, small):
        found = scratch.like(t)
        assert found.shape == t.shape and found.dtype == t.dtype and found.data_ptr() == place
        del found


def test_scratch_in_use_is_not_reused() -> None:
    scratch = Scratch(10 * BYTES)
    held = scratch.like(torch.zeros(SHAPE))
    part = held[1:2]
    del held
    other = scratch.like(torch.zeros(SHAPE))
    assert other.untyped_storage().data_ptr() != part.untyped_storage().data_ptr()
    scratch.clear()
    assert scratch.like(torch.zeros(SHAPE)).untyped_storage().data_ptr() != part.untyped_storage().data_ptr()


def test_scratch_for_other_layouts_and_large_ones_is_new_memory() -> None:
    scratch = Scratch(BYTES)
    turned = torch.zeros(4, 8).t()
    assert scratch.like(turned).stride() == turned.stride()
    assert scratch.like(torch.zeros(5, 8)).shape == (5, 8)
    kept = scratch.like(torch.zeros(2))
    assert kept.untyped_storage().nbytes() == 8  # neither was kept
