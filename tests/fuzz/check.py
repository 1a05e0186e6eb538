"""Compare clipwise's per-example gradients of one random model with one forward pass per example."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from clipwise.clipping import PerExample
from clipwise.errors import CoupledExamplesError, UnsupportedModelError
from clipwise.gradients import METHODS, FallbackWarning, Memory, per_example_gradients
from clipwise.gradients.rules import registry
from tests.fuzz.models import Composed, compose
from tests.gradients.cases import losses, oracle, trainable
from tests.sites import site

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # relative to the longest gradient of the batch


@dataclass
class Outcome:
    """The result for one model. `problem` is empty if there is none."""

    seed: int
    traits: frozenset[str]
    method: str = ""
    rules: set[str] = field(default_factory=set)
    fallbacks: set[str] = field(default_factory=set)
    refused: bool = False
    problem: str = ""


def check(seed: int) -> Outcome:
    """Build the model of a seed and compare. The result does not depend on other seeds."""
    composed = compose(seed)
    method = random.Random(f"method {seed}").choice(METHODS)
    outcome = Outcome(seed, composed.traits, method)
    try:
        with spied_rules(outcome.rules):
            outcome.problem = _compare(composed, outcome)
    except (CoupledExamplesError, UnsupportedModelError) as error:
        outcome.refused = True
        outcome.problem = "" if composed.refusable else f"refused: {error}"
    except Exception as error:  # a crash is a finding too, and the other seeds continue
        outcome.problem = f"crashed: {type(error).__name__}: {error}"
    return outcome


def _compare(composed: Composed, outcome: Outcome) -> str:
    model, inputs = composed.model, (composed.batches[-1],)
    parameters, memory, batch = trainable(model), Memory(), len(inputs[0])
    dtype = next(iter(parameters.values())).dtype
    generator = torch.Generator().manual_seed(composed.seed)
    weights_B = torch.rand(batch, dtype=torch.float64, generator=generator) + 0.5
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        for x in composed.batches[:-1]:
            per_example_gradients(losses(model, (x,)), parameters, memory)
        found = per_example_gradients(losses(model, inputs), parameters, memory)
        squares = found.squared_norms()
        sums = found.weighted_sums(dict.fromkeys(parameters, weights_B))
        written = found.instantiate(slice(0, batch))
        max_norm = 0.5 * float(torch.stack(list(squares.values())).sum(0).sqrt().mean()) + 1e-6
        strategy = PerExample(max_norm, method=outcome.method)
        clipper = strategy.attach(site(parameters))
        clipped = clipper.clipped_sum(losses(model, inputs))
    outcome.fallbacks |= memory.fallbacks

    truth = oracle(model, tuple(x.detach() for x in inputs))
    norms = {name: g.reshape(batch, -1).norm(dim=1) for name, g in truth.items()}
    whole_B = torch.stack([n.square() for n in norms.values()]).sum(0).sqrt()
    nu_B = (max_norm / whole_B).clamp(max=1)
    # The second term is for gradients that are 0 up to the rounding of numbers around 1.
    bound = TOLERANCE[dtype] * float(whole_B.max()) + 100 * torch.finfo(dtype).eps
    for what, ours, expected in (
        ("gradient", written, truth),
        ("norm", {name: s.sqrt() for name, s in squares.items()}, norms),
        ("weighted sum", sums, _weighted(weights_B, truth)),
        (f"clipped sum by {outcome.method}", clipped, _weighted(nu_B, truth)),
    ):
        for name, g in expected.items():
            error = float((ours[name].detach().double() - g).abs().max())
            if not error <= bound:  # also true for NaN
                return f"{what} of {name} is off by {error:.1e}, more than {bound:.1e}"
    return ""


def _weighted(weights_B: Tensor, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.einsum("b,b...->...", weights_B, g) for name, g in gradients.items()}


@contextmanager
def spied_rules(seen: set[str]) -> Iterator[None]:
    """Add the names of the rules that return forms to `seen`."""

    def spied(name: str, rule: Any) -> Any:
        def begin(*read: Any) -> Any:
            finish = rule(*read)

            def finished(*given: Any) -> Any:
                forms = finish(*given)
                seen.add(name)
                return forms

            return finished

        return begin

    rules = {name: found._replace(rule=spied(name, found.rule)) for name, found in registry.RULES.items()}
    with mock.patch.object(registry, "RULES", rules):
        yield
