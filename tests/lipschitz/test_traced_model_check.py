"""A model that no longer computes its trace is refused; irrelevant changes are accepted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_modules

from clipwise.errors import StepError, UnsupportedModelError
from clipwise.layers import ClipInput
from clipwise.lipschitz import trace
from clipwise.lipschitz.traced_model_check import AsTraced


@dataclass
class Settings:
    shift: float = 0.0


class Model(nn.Module):
    """Reads a number, a rate, tensors and layers in every possible form."""

    def __init__(self) -> None:
        super().__init__()
        self.clip, self.frozen, self.last = ClipInput(1.0), nn.Linear(4, 4), nn.Linear(4, 3)
        self.shift, self.rate, self.shifts, self.settings = 0.0, 0.1, [0.0], Settings()
        self.register_buffer("scale", torch.ones(4))
        self.factor = nn.Parameter(torch.ones(4), requires_grad=False)
        self.plain = torch.ones(4)
        self.branch: float | None = None
        self.unused, self.seen = 0.0, torch.zeros(1)
        self.act = nn.LeakyReLU(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shift + self.clip(x) - self.shifts[0] + self.settings.shift
        self.seen = x
        if self.branch is not None:
            x = x + self.branch
        x = F.dropout(x, self.rate, self.training) * self.scale * self.factor * self.plain
        return self.last(self.act(self.frozen(x)))  # type: ignore[no-any-return]


def _replace_weight(m: Model) -> None:
    m.frozen.weight = nn.Parameter(1000 * m.frozen.weight, requires_grad=False)


CHANGES: dict[str, tuple[Callable[[Model], Any], str]] = {
    "a number": (lambda m: setattr(m, "shift", 1e3), r"add\(1000\.0, clip\), where it had add\(0\.0, clip\)"),
    "a number in a list": (lambda m: m.shifts.__setitem__(0, 1e3), r"1000\.0"),
    "a number in a dataclass": (lambda m: setattr(m.settings, "shift", 1e3), r"1000\.0"),
    "a rate": (lambda m: setattr(m, "rate", 0.9), r"p=0\.9"),
    "a branch": (lambda m: setattr(m, "branch", 5.0), r"add\(.*5\.0\)"),
    "a mode": (lambda m: m.eval(), "training=False"),
    "a buffer": (lambda m: setattr(m, "scale", 1000 * m.scale), "'scale' was replaced"),
    "a frozen parameter": (
        lambda m: setattr(m, "factor", nn.Parameter(1000 * m.factor, requires_grad=False)),
        "'factor' was replaced",
    ),
    "a plain tensor": (lambda m: setattr(m, "plain", 1000 * m.plain), "'plain' was replaced"),
    "a layer's weight": (_replace_weight, r"layer 'frozen' \(Linear\)"),
    "a layer": (lambda m: setattr(m, "frozen", nn.Linear(4, 4)), "'frozen' was replaced"),
    "a setting": (lambda m: setattr(m.act, "negative_slope", 9.0), r"layer 'act' \(LeakyReLU\)"),
    "a class": (lambda m: setattr(m.act, "__class__", nn.ReLU), "layer 'act'"),
}


class WithoutTensors(Model):
    """Has no tensor in a plain attribute, so comparing identities is enough while nothing changes."""

    def __init__(self) -> None:
        super().__init__()
        del self.plain, self.seen
        self.words, self.pairs = {"a": [1.0]}, ((1.0, [2.0]), "b")

    def forward(self, x: Tensor) -> Tensor:
        x = self.shift + self.clip(x) - self.shifts[0] + self.settings.shift + self.words["a"][0] + self.pairs[0][1][0]
        if self.branch is not None:
            x = x + self.branch
        x = F.dropout(x, self.rate, self.training) * self.scale * self.factor
        return self.last(self.act(self.frozen(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [Model, WithoutTensors])
@pytest.mark.parametrize("what", CHANGES)
def test_state_that_bounds_depend_on_must_not_change(what: str, kind: type[Model]) -> None:
    if what == "a plain tensor" and kind is WithoutTensors:
        pytest.skip("it has none")
    model = kind()
    same = AsTraced(model, trace(model, (4,)))
    same.require()
    change, message = CHANGES[what]
    change(model)
    for _ in range(2):  # a refusal does not record the new state
        with pytest.raises(StepError, match=message):
            same.require()


def test_nested_attributes_must_not_change() -> None:
    for write in (lambda m: m.words["a"].__setitem__(0, 7.0), lambda m: m.pairs[0][1].__setitem__(0, 7.0)):
        model = WithoutTensors()
        same = AsTraced(model, trace(model, (4,)))
        same.require()
        write(model)
        with pytest.raises(StepError, match=r"7\.0"):
            same.require()


@pytest.mark.parametrize("when", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_on_a_layer_are_refused_until_removed(when: str) -> None:
    model = WithoutTensors()
    same = AsTraced(model, trace(model, (4,)))
    handle = getattr(model.act, f"register_{when}_hook")(lambda *_: None)
    with pytest.raises(StepError, match="layer 'act'"):
        same.require()
    handle.remove()
    model.act._is_full_backward_hook = None
    same.require()


def test_other_state_may_change() -> None:
    model = Model()
    same = AsTraced(model, trace(model, (4,)))
    for _ in range(3):
        model(torch.randn(2, 4))  # sets `seen`
        model.unused += 1.0
        same.require()
    with torch.no_grad():
        model.scale.mul_(2)  # bounds measure it again
    model.extra = nn.Linear(2, 2)
    same.require()
    assert isinstance(model.seen, Tensor)  # not what tracing put there


def test_an_unchanged_model_is_not_traced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(4), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.factor

    layers = [ClipInput(1.0), nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 3).requires_grad_(False)]
    model = nn.Sequential(layers[0], Scale(), *layers[1:], nn.Identity())
    same = AsTraced(model, trace(model, (4,)))
    monkeypatch.setattr("clipwise.lipschitz.traced_model_check.graph_again", None)
    model(torch.randn(2, 4))
    same.require()


class Elsewhere:
    """State that a forward pass may read outside its modules."""

    number = 0.0


class Reader(nn.Module):
    """Reads numbers and layers from outside its modules."""

    def __init__(self, read: Callable[[Reader], float], drops: Callable[[], float] = lambda: 0.1) -> None:
        super().__init__()
        self.clip, self.last = ClipInput(1.0), nn.Linear(4, 3)
        self.read, self.drops, self.space = read, drops, SimpleNamespace(number=0.0)
        self.tensors, self.array = [torch.zeros(1)], np.zeros(1)
        self.register_buffer("scalar", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.dropout(self.clip(x), self.drops()) + self.read(self))  # type: ignore[no-any-return]


HIDDEN: dict[str, tuple[Callable[[Reader], float], Callable[[Reader], Any]]] = {
    "a class": (lambda m: Elsewhere.number, lambda m: setattr(Elsewhere, "number", 9.0)),
    "a namespace": (lambda m: m.space.number, lambda m: setattr(m.space, "number", 9.0)),
    "a tensor in a list": (lambda m: m.tensors[0].item(), lambda m: m.tensors[0].fill_(9.0)),
    "a buffer": (lambda m: float(m.scalar), lambda m: m.scalar.fill_(9.0)),  # type: ignore[arg-type, operator]
    "an array": (lambda m: float(m.array[0]), lambda m: m.array.fill(9.0)),
}


@pytest.mark.parametrize("where", HIDDEN)
def test_a_number_from_anywhere_must_not_change(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Elsewhere, "number", 0.0)
    read, change = HIDDEN[where]
    model = Reader(read)
    same = AsTraced(model, trace(model, (4,)))
    same.require()
    change(model)
    with pytest.raises(StepError, match=r"add\(dropout, 9\.0\), where it had add\(dropout, 0\.0\)"):
        same.require()


def test_a_rate_from_anywhere_must_not_change() -> None:
    rates = [0.1]
    model = Reader(lambda m: 0.0, lambda: rates[0])
    same = AsTraced(model, trace(model, (4,)))
    rates[0] = 0.9
    with pytest.raises(StepError, match=r"p=0\.9"):
        same.require()


@pytest.mark.parametrize("kind", ["frozen", "dropout"])
def test_another_layer_chosen_from_anywhere_is_refused(kind: str) -> None:
    chosen = [0]

    class Chooser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            made = (lambda: nn.Linear(4, 4).requires_grad_(False)) if kind == "frozen" else nn.Dropout
            self.clip, self.last = ClipInput(1.0), nn.Linear(4, 3)
            self.those = nn.ModuleList(made() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.those[chosen[0]](self.clip(x)))  # type: ignore[no-any-return]

    model = Chooser()
    same = AsTraced(model, trace(model, (4,)))
    same.require()
    chosen[0] = 1
    with pytest.raises(StepError, match=r"those\.1.*where it had those\.0"):
        same.require()


REGISTER = {
    "forward": torch_modules.register_module_forward_hook,
    "before": torch_modules.register_module_forward_pre_hook,
    "backward": torch_modules.register_module_full_backward_hook,
    "before backward": torch_modules.register_module_full_backward_pre_hook,
}


@pytest.mark.parametrize("when", REGISTER)
def test_hooks_on_all_modules_are_refused(when: str) -> None:
    model = Model()
    same = AsTraced(model, trace(model, (4,)))
    handle = REGISTER[when](lambda *_: None)
    try:
        with pytest.raises(UnsupportedModelError, match="hooks on all modules"):
            same.require()
        with pytest.raises(UnsupportedModelError, match="hooks on all modules"):
            trace(model, (4,))
    finally:
        handle.remove()
    same.require()


def test_hooks_on_a_whole_model_are_refused() -> None:
    model = nn.Sequential(nn.Sequential(ClipInput(1.0), nn.Linear(4, 3)))
    same = AsTraced(model, trace(model, (4,)))
    for module in (model, model[0]):
        handle = module.register_forward_hook(lambda m, i, o: 1000 * o)
        with pytest.raises(UnsupportedModelError, match="it has hooks"):
            same.require()
        handle.remove()
