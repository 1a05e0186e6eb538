"""The exactness table: every case and method against a forward and backward pass per example."""

import warnings

import pytest
import torch

from clipwise.gradients import METHODS, FallbackWarning, Memory, per_example_gradients
from tests.gradients.cases import CASES, Case, losses, oracle, trainable

BY_NAME = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def compare(case: Case, batch: int, dtype: torch.dtype, seed: int, memory: Memory, method: str = "bookkeeping") -> None:
    tolerance = TOLERANCE[dtype]
    model, inputs = case.build(dtype, seed), case.draw(batch, dtype, seed + 1)
    parameters = trainable(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if case.fallback else "error", FallbackWarning)
        found = per_example_gradients(losses(model, inputs), parameters, memory, method)
        squares, ours = found.squared_norms(), found.instantiate(slice(0, batch))
    weights = torch.rand(batch, dtype=torch.float64)
    sums = found.weighted_sums(dict.fromkeys(parameters, weights))
    truth = oracle(model, inputs)
    scale = max(float(g.reshape(batch, -1).norm(dim=1).max()) for g in truth.values())
    for name, expected in truth.items():
        norms = expected.reshape(batch, -1).norm(dim=1)
        assert (ours[name].double() - expected).abs().max() <= tolerance * scale, name
        assert (squares[name].sqrt() - norms).abs().max() <= 10 * tolerance * scale, name
        assert (squares[name].sqrt() >= norms - tolerance * scale).all(), name
        weighted = torch.einsum("b,b...->...", weights, expected)
        assert (sums[name].double() - weighted).abs().max() <= tolerance * scale * batch, name


@BY_NAME
def test_equals_a_forward_pass_per_example(case: Case) -> None:
    memory = Memory()
    for seed, batch in enumerate((6, 6, 4, 6, 5, 2, 3, 1)):
        compare(case, batch, torch.float64, seed, memory)


@BY_NAME
@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_exact_in_float32(case: Case, method: str) -> None:
    for seed in range(2):
        compare(case, 6, torch.float32, seed, Memory(), method)


@BY_NAME
@pytest.mark.parametrize("method", ["reweight", "instantiate", "vmap", "loop"])
def test_every_method_is_exact_in_float64(case: Case, method: str) -> None:
    memory = Memory()
    for seed, batch in enumerate((4, 4, 3)):
        compare(case, batch, torch.float64, seed, memory, method)
