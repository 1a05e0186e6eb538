"""The choice of `auto`, by free memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from clipwise.gradients import Memory, free_memory, per_example_gradients
from clipwise.gradients.examples import PerExampleGradients
from clipwise.gradients.methods import Reweighted
from clipwise.gradients.stream import Stream
from tests.gradients.cases import trainable

CPU = torch.device("cpu")


class Scene:
    """A small model with a known graph, on a machine with a given amount of free memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.manual_seed(0)
        self.model, self.memory = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), Memory()
        self.free: int | None = None
        self.asked = 0
        monkeypatch.setattr(free_memory, "free_bytes", self._free_bytes)
        for _ in range(2):
            self.found(8)

    def _free_bytes(self, device: torch.device) -> int | None:
        self.asked += 1
        return self.free

    def losses(self, batch: int, length: int) -> torch.Tensor:
        return self.model(torch.randn(batch, length, 5)).sum((1, 2))

    def found(self, batch: int, length: int = 7, method: str = "auto") -> PerExampleGradients:
        return per_example_gradients(self.losses(batch, length), trainable(self.model), self.memory, method)

    def wanted(self, batch: int, length: int = 7) -> int:
        stream = Stream(self.losses(batch, length), trainable(self.model), self.memory)
        return free_memory.wanted_bytes(stream.output_bytes(), trainable(self.model), batch)[CPU]


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_the_output_gradients_are_counted(scene: Scene) -> None:
    stream = Stream(scene.losses(8, 7), trainable(scene.model), scene.memory)
    assert stream.output_bytes() == {CPU: 8 * 7 * (4 + 3) * 4}


@pytest.mark.parametrize(("share", "streams"), [(0.5, True), (1.0, True), (1.3, False), (100.0, False)])
def test_the_choice_goes_by_free_memory(scene: Scene, share: float, streams: bool) -> None:
    scene.free = int(share * scene.wanted(8))
    assert isinstance(scene.found(8), Reweighted) is streams


def test_unknown_memory_means_bookkeeping(scene: Scene) -> None:
    assert scene.asked == 0  # the first batches are probed, and keep their gradients anyway
    assert not isinstance(scene.found(8), Reweighted)
    assert scene.asked == 1


def test_it_is_decided_once_for_each_size(scene: Scene) -> None:
    scene.free = 2 * scene.wanted(8)
    assert not isinstance(scene.found(8), Reweighted)
    scene.free = 0
    assert not isinstance(scene.found(8), Reweighted)
    assert scene.asked == 1
    assert not isinstance(scene.found(6), Reweighted)  # a smaller batch fits too
    assert scene.asked == 1
    assert isinstance(scene.found(10), Reweighted)
    assert isinstance(scene.found(12), Reweighted)  # and a larger one does not
    assert scene.asked == 2
    assert isinstance(scene.found(8, length=9), Reweighted)
    assert scene.asked == 3


def test_the_choice_changes_no_result(scene: Scene) -> None:
    found = []
    for free in (0, 2**40):
        scene.free = free
        for outline in scene.memory.outlines._known:
            outline.fits.clear()
        torch.manual_seed(1)
        found.append(scene.found(8))
    streamed, kept = found
    assert isinstance(streamed, Reweighted) and not isinstance(kept, Reweighted)
    squares = streamed.squared_norms()
    torch.testing.assert_close(squares, kept.squared_norms())
    weights = dict.fromkeys(squares, torch.rand(8, dtype=torch.float64))
    torch.testing.assert_close(streamed.weighted_sums(weights), kept.weighted_sums(weights))


def test_the_host_reports_available_memory() -> None:
    free = free_memory.free_bytes(CPU)
    assert free is None or free > 2**20
    assert free_memory.free_bytes(torch.device("meta")) is None


def test_the_smaller_of_two_limits_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_memory, "_SYSTEM", tmp_path / "meminfo")
    monkeypatch.setattr(free_memory, "_GROUP", tmp_path)
    assert free_memory.free_bytes(CPU) is None
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:  5000 kB\n")
    assert free_memory.free_bytes(CPU) == 5000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    assert free_memory.free_bytes(CPU) == 5000 * 1024
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.stat").write_text("anon 7\ninactive_file 500\n")
    assert free_memory.free_bytes(CPU) == 2000500
