"""Parameter groups (parts), and the interface of policies that choose them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from clipwise.clipping.base import Site
from clipwise.errors import ConfigurationError

if TYPE_CHECKING:
    from clipwise.clipping.public import PublicData
    from clipwise.clipping.thresholds import Constants

Groups = str | Sequence[Collection[str]] | Mapping[str, Collection[str]]


class Policy(ABC):
    """A rule that groups parameters and chooses their constants; passed as `parts` of a strategy."""

    @abstractmethod
    def constants(self, max_norm: float, site: Site) -> Constants:
        """The constants for one model. Raises if the rule does not support it."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """The rule in JSON types, with the public data that it uses."""

    def public_data(self) -> tuple[PublicData, ...]:
        """The public data that the rule uses."""
        return ()


def group_parameters(
    parts: Groups, parameters: Mapping[str, torch.nn.Parameter], argument: str = "parts"
) -> dict[str, list[str]]:
    """Part name -> parameter names. Every parameter is in exactly one part. Errors name `argument`.

    "all": one part; "layer": one part per module (weight and bias together); "tensor": one part per parameter; or a
    list or mapping of lists of parameter names, or of module names for all parameters below them.
    """
    if isinstance(parts, str):
        if parts == "all":
            return {"all": list(parameters)}
        if parts == "tensor":
            return {name: [name] for name in parameters}
        if parts == "layer":
            layers: dict[str, list[str]] = {}
            for name in parameters:
                layers.setdefault(_layer_of(name), []).append(name)
            own = "model" if "model" not in layers else "(model)"  # for parameters of the root module
            return {layer or own: names for layer, names in layers.items()}
        raise ConfigurationError(
            f"{argument}={parts!r} is not known: use 'all', 'layer', 'tensor' or lists of parameter names."
        )
    named = _named(parts, argument)
    for part, names in named.items():
        if not names:
            raise ConfigurationError(f"{argument}: {part!r} has no parameters; remove it.")
    grouped = {
        part: [n for want in _in_order(names) for n in _under(want, parameters, argument)]
        for part, names in named.items()
    }
    seen = [name for names in grouped.values() for name in names]
    for name in parameters:
        if seen.count(name) != 1:
            times = "in no part" if name not in seen else "in several parts"
            raise ConfigurationError(f"{argument}: trainable parameter {name!r} is {times}; it must be in exactly one.")
    return grouped


def _layer_of(name: str) -> str:
    """The module of a parameter; for an original of a parametrized weight, the module of the weight."""
    path = name.split(".")
    return ".".join(path[: path.index("parametrizations")] if "parametrizations" in path else path[:-1])


def _named(given: object, argument: str) -> Mapping[str, Collection[str]]:
    """Part name -> names. Raises if `given` does not consist of lists of names."""
    parts = given
    if isinstance(parts, (list, tuple)):
        parts = {f"group {i}": names for i, names in enumerate(parts)}
    lists = list(parts.values()) if isinstance(parts, Mapping) else [None]
    if all(isinstance(names, (list, tuple, set, frozenset)) for names in lists) and all(
        isinstance(name, str) for names in lists for name in names or ()
    ):
        assert isinstance(parts, Mapping)
        return parts
    raise ConfigurationError(
        f"{argument}={given!r} is not known: use 'all', 'layer', 'tensor', or a list of lists of parameter names, "
        "such as [['0.weight'], ['2.weight', '2.bias']]."
    )


def described_groups(groups: Groups) -> Any:
    """The groups as given, in JSON types."""
    if isinstance(groups, str):
        return groups
    if isinstance(groups, Mapping):
        return {part: _in_order(names) for part, names in groups.items()}
    return [_in_order(names) for names in groups]


def _in_order(names: Collection[str]) -> list[str]:
    """The names in a reproducible order: the order of a set differs between processes."""
    return sorted(names) if isinstance(names, (set, frozenset)) else list(names)


def _under(wanted: str, parameters: Mapping[str, torch.nn.Parameter], argument: str) -> list[str]:
    found = [name for name in parameters if name == wanted or name.startswith(wanted + ".")]
    if not found:
        raise ConfigurationError(f"{argument}: {wanted!r} is not a trainable parameter or module of the model.")
    return found


def norms_of_parts(max_norm: float | Mapping[str, float], parts: Sequence[str]) -> dict[str, float]:
    """C_k of each part: as given, or C / sqrt(K), so that the whole gradient has norm at most C."""
    if isinstance(max_norm, Mapping):
        missing = [part for part in parts if part not in max_norm]
        if missing or len(max_norm) != len(parts):
            raise ConfigurationError(f"max_norm: give one number for each of the parts {', '.join(map(repr, parts))}.")
        return {part: max_norm[part] for part in parts}
    return dict.fromkeys(parts, max_norm / math.sqrt(len(parts)))
