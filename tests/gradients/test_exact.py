import warnings

import pytest
import torch

from clipwise.gradients import FallbackWarning, Memory, by_bookkeeping, by_loop
from tests.gradients.cases import CASES, Case, losses, oracle, trainable

BY_NAME = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


def compare(case: Case, batch: int, dtype: torch.dtype, seed: int, tolerance: float, memory: Memory) -> None:
    model, inputs = case.build(dtype, seed), case.draw(batch, dtype, seed + 1)
    parameters = trainable(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if case.fallback else "error", FallbackWarning)
        found = by_bookkeeping(losses(model, inputs), parameters, memory)
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
        compare(case, batch, torch.float64, seed, 1e-10, memory)


@BY_NAME
def test_equals_a_forward_pass_per_example_in_float32(case: Case) -> None:
    for seed in range(2):
        compare(case, 6, torch.float32, seed, 1e-5, Memory())


@BY_NAME
def test_the_loop_agrees(case: Case) -> None:
    model, inputs = case.build(), case.draw(4)
    ours = by_loop(losses(model, inputs), trainable(model)).instantiate(slice(0, 4))
    for name, expected in oracle(model, inputs).items():
        torch.testing.assert_close(ours[name], expected)
