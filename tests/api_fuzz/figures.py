"""Accounting without training: results are finite, monotone and consistent."""

from __future__ import annotations

from typing import Any

from clipwise import accounting
from tests.api_fuzz.outcome import require
from tests.api_fuzz.values import Choice

SCHEMES = ("poisson", "fixed-size", "partition", "shuffled", "full", "truncated-poisson")
SLACK = 1e-6  # between results from two grids


def play(choice: Choice) -> list[str]:
    """Compare one result with a neighbouring one that must not be smaller."""
    sampling = choice.of("sampling", *SCHEMES)
    arguments: dict[str, Any] = {
        "noise_multiplier": choice.of("noise_multiplier", 0.7, 1.0, 2.0, 5.0),
        "steps": choice.of("steps", 1, 3, 10, 40),
        "sampling": sampling,
    }
    named = sampling if isinstance(sampling, str) else ""
    if named == "shuffled":
        arguments["period"] = choice.of("period", 1, 4, 10)
    elif named != "full":
        arguments["sample_rate"] = choice.of("sample_rate", 0.01, 0.25, 1.0)
    if named == "truncated-poisson":
        arguments["dataset_size"] = choice.of("dataset_size", 100, 1000)
    if choice.is_likely(0.2):
        arguments["accountant"] = choice.of("accountant", "pld", "rdp", "zcdp", "gdp")
    if choice.is_likely(0.2):
        arguments["adjacency"] = choice.of("adjacency", "zero-out", "add-remove", "replace-one")
    if choice.is_likely(0.3):
        return _delta(choice, arguments)
    arguments["delta"] = choice.of("delta", 1e-9, 1e-5, 0.01)
    found = accounting.epsilon(**arguments)
    require(isinstance(found, float) and found >= 0, f"epsilon is {found!r}")
    if choice.spoiled:
        return []
    more = accounting.epsilon(**{**arguments, "steps": 2 * arguments["steps"]})
    require(more >= found or more >= found - SLACK * max(1.0, found), f"twice the steps cost {more}, once {found}")
    less = accounting.epsilon(**{**arguments, "noise_multiplier": 2 * arguments["noise_multiplier"]})
    require(less <= found or less <= found + SLACK * max(1.0, found), f"twice the noise costs {less}, once {found}")
    return []


def _delta(choice: Choice, arguments: dict[str, Any]) -> list[str]:
    arguments["epsilon"] = choice.of("epsilon", 0.0, 0.5, 3.0)
    found = accounting.delta(**arguments)
    require(isinstance(found, float) and 0 <= found <= 1, f"delta is {found!r}")
    tight = arguments.get("accountant", "pld") == "pld"  # the others' bounds are not inverse to each other
    if not choice.spoiled and tight and 1e-9 < found < 1:
        back = accounting.epsilon(**{k: v for k, v in arguments.items() if k != "epsilon"}, delta=found)
        require(back <= arguments["epsilon"] + 1e-3, f"epsilon {back} at the delta of {arguments['epsilon']}")
    return []
