"""Lengths of tensors: those of float64, whatever their size and order of memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from clipwise.clipping import vector_clipping
from clipwise.clipping.vector_clipping import tensor_lengths


@pytest.mark.parametrize("most", [2**31, 10])
def test_each_has_its_own_length(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty and huge ones, which the call for many does not take, are in their place too."""
    monkeypatch.setattr(vector_clipping, "_MOST", most)
    tensors = [
        torch.zeros(0),
        torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last),
        torch.tensor(-3.0),
        torch.randn(5, 7)[:, 0],
        torch.zeros(2, 0),
        torch.full((9,), 1e30),  # whose squares are beyond float32
        torch.randn(6, dtype=torch.float64),
    ]
    together = torch._foreach_norm
    taken: list[int] = []

    def watched(given: list[torch.Tensor], *arguments: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        taken.extend(t.numel() for t in given)
        return together(given, *arguments, **options)

    monkeypatch.setattr(torch, "_foreach_norm", watched)
    found = tensor_lengths(tensors)
    assert taken == [t.numel() for t in tensors if 0 < t.numel() < most]
    assert [t.dtype for t in found] == [torch.float64] * len(tensors)
    assert torch.stack(found).tolist() == pytest.approx([float(t.double().norm()) for t in tensors], rel=1e-12)
    assert tensor_lengths([]) == [] and bool(tensor_lengths([torch.tensor([1.0, torch.nan])])[0].isnan())
