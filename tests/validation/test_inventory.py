"""The lists follow every change of the model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from clipwise.validation.inventory import Inventory


def model() -> nn.Sequential:
    inner = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3).eval())
    made = nn.Sequential(nn.Linear(2, 3), inner, nn.Linear(3, 1))
    made.register_buffer("scale", None)
    return made


def _replace_layer(m: nn.Sequential) -> None:
    m[1][0] = nn.Linear(3, 3)


def _replace_parameter(m: nn.Sequential) -> None:
    m[2].weight = nn.Parameter(torch.zeros(1, 3))


def _rename(m: nn.Sequential) -> None:
    m._modules["last"] = m._modules.pop("2")


def _parametrize(m: nn.Sequential) -> None:
    nn.utils.parametrizations.weight_norm(m[0])


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "a layer more": lambda m: m.append(nn.Linear(1, 1)),
    "a layer added inside": lambda m: m[1].append(nn.BatchNorm1d(3)),
    "a layer less": lambda m: m.__delitem__(1),
    "another layer": _replace_layer,
    "another parameter": _replace_parameter,
    "a parameter more": lambda m: m[1][0].register_parameter("late", nn.Parameter(torch.zeros(1))),
    "a parameter less": lambda m: m[1][0].register_parameter("bias", None),
    "a buffer more": lambda m: m[1][0].register_buffer("late", torch.zeros(1)),
    "a buffer set": lambda m: setattr(m, "scale", torch.ones(1)),
    "an attribute more": lambda m: setattr(m[1][0], "seen", torch.zeros(1)),
    "an attribute that becomes a tensor": lambda m: setattr(m[2], "out_features", torch.ones(1)),
    "another name": _rename,
    "a parametrization": _parametrize,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_detected(change: str) -> None:
    m = model()
    inventory = Inventory(m)
    inventory.up_to_date()
    CHANGES[change](m)
    now, fresh = inventory.up_to_date(), Inventory(m).up_to_date()
    assert [(n, id(p)) for n, p in now.parameters] == [(n, id(p)) for n, p in m.named_parameters()]
    assert [(n, id(layer)) for n, layer in now.statistics] == [(n, id(layer)) for n, layer in fresh.statistics]
    assert [(n, id(place[key])) for n, place, key in now.tensors] == [
        (n, id(place[key])) for n, place, key in fresh.tensors
    ]


def test_the_lists_are_rebuilt_only_after_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    m = model()
    inventory = Inventory(m)
    inventory.up_to_date()
    m(torch.randn(4, 2)).sum().backward()
    m.requires_grad_(False)
    monkeypatch.setattr(inventory, "_walk", lambda: pytest.fail("walked again"))
    inventory.up_to_date()


def test_every_tensor_has_its_full_name() -> None:
    names = [name for name, _, _ in Inventory(model()).up_to_date().tensors]
    assert "Parameter '1.0.weight'" in names and "Buffer 'scale'" in names
    assert len(set(names)) == len(names)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_weights_of_parametrizations_are_not_listed() -> None:
    """Every forward pass computes them from parameters alone."""
    for make in (nn.utils.weight_norm, nn.utils.spectral_norm, _pruned):
        listed = Inventory(make(nn.Linear(3, 3))).up_to_date().tensors
        assert not [name for name, _, _ in listed if name.startswith("Attribute")]


def _pruned(layer: nn.Linear) -> nn.Module:
    return prune.random_unstructured(layer, "weight", amount=1)
