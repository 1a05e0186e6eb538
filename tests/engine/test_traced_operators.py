"""A traced graph holds bounds from inner products and kernels as operators: few nodes, whatever the sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clipwise import kernels
from clipwise.engine.traced_sum import TracedSum
from clipwise.kernels import convolution, patches
from clipwise.kernels.tracing import tracing
from tests.engine.test_compiled_traced import Language
from tests.runs import private_run, sgd

pytestmark = pytest.mark.usefixtures("one_thread")


def graph_of(model: nn.Module, loss: object, *rows: Tensor) -> TracedSum:
    _, private = private_run(model, sgd(model), TensorDataset(*rows), probe_independence=False, seed=0)
    next(iter(private.loader))
    return TracedSum(private._context, loss, 4, tuple(t[:4] for t in rows), run_by_torch=True)  # type: ignore[arg-type]


def language(length: int) -> TracedSum:
    torch.manual_seed(0)
    model, ids = Language(vocabulary=400, width=64, positions=length), torch.randint(400, (40, length + 1))
    return graph_of(
        model,
        lambda x, y: F.cross_entropy(model(x), y, reduction="none").mean(1),
        ids[:, :-1].clone(),
        ids[:, 1:].clone(),
    )


def targets(graph: TracedSum) -> list[str]:
    return [str(node.target) for node in graph._run.graph.nodes if node.op == "call_function"]  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_longer_context_has_no_more_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clipwise.gradients.forms.outer.gram_is_cheaper", lambda *sizes: True)
    short, long = targets(language(8)), targets(language(300))
    assert short.count("clipwise.gram_squares.default") >= 3
    assert len(long) <= len(short) + 8


def test_windows_are_one_node_for_any_batch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.Conv2d(64, 96, 3), nn.Flatten(), nn.Linear(96 * 4, 3))
    x, y = torch.randn(40, 3, 6, 6), torch.randint(3, (40,))
    graph = graph_of(model, lambda x, y: F.cross_entropy(model(x), y, reduction="none"), x, y)
    assert targets(graph).count("clipwise.window_squares.default") == 1
    assert graph.compare((x[8:12], y[8:12]), 4) is None and graph.compare((x[4:8], y[4:8]), 4) is None
    assert graph.is_trusted


def test_kernels_are_operators_of_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their results have the shapes and strides of the operators' descriptions, which a trace works with."""
    image, g = torch.randn(2, 1, 3, 6, 6, device="meta"), torch.randn(2, 1, 4, 4, 4, device="meta")
    rows = torch.randn(2, 3, 6, 6, device="meta").to(memory_format=torch.channels_last)
    with tracing():
        assert not kernels.usable(torch.empty(0))
        place = (3, 3), (1, 1), (0, 0), (1, 1)
        found = convolution.weight_gradients(image, g, *place, tf32=False)
        assert found.shape == (2, 4, 3, 3, 3) and found.is_contiguous()
        copied = patches.patches(rows, *place, (4, 4))
        assert copied.shape == (2, 16, 27) and copied.is_contiguous()
