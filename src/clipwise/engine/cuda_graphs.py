"""Functions captured as CUDA graphs, and the optimizer's step as one of them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol

import torch
from torch import Tensor

_UPDATES_BEFORE = 3  # updates with the same settings, of which this one is captured


class Graph(Protocol):
    """What was captured: the same work on the same memory."""

    def replay(self) -> None:
        """Do it once more."""


def capture(act: Callable[[], Any], device: torch.device, warm: bool = True) -> Graph:
    """Capture a function. It runs twice beforehand, the second time where to wait for the device is an error."""
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        mode = torch.cuda.get_sync_debug_mode()
        with torch.cuda.stream(stream):
            if warm:
                act()  # compiles kernels and makes handles, which may wait
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
                try:
                    act()
                finally:
                    torch.cuda.set_sync_debug_mode(mode)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            act()
        return graph


class Update:
    """The optimizer's step as a graph, while its settings stay what they were."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, device: torch.device, own_hooks: Collection[int] = ()
    ) -> None:
        self._optimizer, self._device, self._own_hooks = optimizer, device, own_hooks
        self._graph: Graph | None = None
        self._settings: object = None
        self._same = 0

    def prepare(self) -> None:
        """Look at the settings, which are numbers in the graph: when one changes, the optimizer itself steps."""
        settings = _settings_of(self._optimizer)
        if settings != self._settings:
            self._graph, self._settings, self._same = None, settings, 0

    def run(self) -> None:
        """Update."""
        self._same += 1
        if self._same == _UPDATES_BEFORE and _is_capturable(self._optimizer, self._own_hooks):
            self._graph = self._capture()
        if self._graph is not None:
            self._graph.replay()
        else:
            self._optimizer.step()

    def _capture(self) -> Graph | None:
        """None if the optimizer waits for the device (as with a tensor for a rate that it must read)."""
        try:
            return capture(self._optimizer.step, self._device, warm=False)
        except RuntimeError:
            return None


def _settings_of(optimizer: torch.optim.Optimizer) -> list[list[object]]:
    """All that a captured update took for granted: numbers, and where tensors are. (It reads those themselves.)"""
    groups = [
        [_place(value) for key, value in group.items() if key != "params"] for group in optimizer.param_groups
    ]
    states = [[_place(value) for value in state.values()] for state in optimizer.state.values()]
    return groups + states


def _place(value: object) -> object:
    return value.data_ptr() if isinstance(value, Tensor) else value


def _is_capturable(optimizer: torch.optim.Optimizer, own_hooks: Collection[int]) -> bool:
    """Plain SGD keeps nothing on the host; others have a setting for it.

    Hooks would run once and no more. Those of the run have nothing to do when the run itself updates.
    """
    hooks: Any = optimizer
    if {*hooks._optimizer_step_pre_hooks, *hooks._optimizer_step_post_hooks} - {*own_hooks}:
        return False
    if type(optimizer) is torch.optim.SGD:
        return True
    return all(group.get("capturable", False) for group in optimizer.param_groups)
