"""Capture of functions and of the optimizer's step as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

_UPDATES_BEFORE = 3  # the update that is captured, counted from the last change of the settings


def capture(act: Callable[[], Any], device: torch.device, warm: bool = True) -> torch.cuda.CUDAGraph:
    """Capture a function after two warm-up runs, of which the second raises if it synchronizes."""
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        mode = torch.cuda.get_sync_debug_mode()
        with torch.cuda.stream(stream):
            if warm:
                act()  # compiles kernels and makes handles, which may synchronize
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
    """The optimizer's step, as a graph while its settings do not change."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device, own_hooks: Collection[int] = ()) -> None:
        self._optimizer, self._device, self._own_hooks = optimizer, device, own_hooks
        self._graph: torch.cuda.CUDAGraph | None = None
        self._settings: object = None
        self._same = 0

    def prepare(self) -> None:
        """Drop the graph if a setting has changed: settings are constants in the graph."""
        settings = _settings_of(self._optimizer)
        if settings != self._settings:
            self._graph, self._settings, self._same = None, settings, 0

    def run(self) -> None:
        """Step, by the graph where there is one."""
        self._same += 1
        if self._same == _UPDATES_BEFORE and _is_capturable(self._optimizer, self._own_hooks):
            self._graph = self._capture()
        if self._graph is not None:
            self._graph.replay()
        else:
            self._optimizer.step()

    def _capture(self) -> torch.cuda.CUDAGraph | None:
        """None if the optimizer synchronizes (as with a tensor learning rate that it must read)."""
        try:
            return capture(self._optimizer.step, self._device, warm=False)
        except RuntimeError:
            return None


def _settings_of(optimizer: torch.optim.Optimizer) -> list[list[object]]:
    """What a captured update assumes constant: numbers, and the addresses of tensors."""
    groups = [[_place(value) for key, value in group.items() if key != "params"] for group in optimizer.param_groups]
    states = [[_place(value) for value in state.values()] for state in optimizer.state.values()]
    return groups + states


def _place(value: object) -> object:
    return value.data_ptr() if isinstance(value, Tensor) else value


def _is_capturable(optimizer: torch.optim.Optimizer, own_hooks: Collection[int]) -> bool:
    """Whether the step keeps no state on the host: plain SGD, or `capturable=True`.

    Hooks would run only at capture. The hooks of the run itself do nothing in its own updates.
    """
    hooks: Any = optimizer
    if {*hooks._optimizer_step_pre_hooks, *hooks._optimizer_step_post_hooks} - {*own_hooks}:
        return False
    if type(optimizer) is torch.optim.SGD:
        return True
    return all(group.get("capturable", False) for group in optimizer.param_groups)
