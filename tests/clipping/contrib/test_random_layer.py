"""One random layer per example: the draw, the sum, the divisor."""

from __future__ import annotations

import math
from collections import Counter
from hashlib import blake2b

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clipwise import PerExample
from clipwise.clipping.contrib.random_layer import Alone, RandomLayer
from clipwise.errors import StepError
from clipwise.gradients import METHODS
from clipwise.privacy import effective_multiplier
from tests.clipping.contrib.test_adaptive import LAYERS
from tests.clipping.policies import rows, small_model
from tests.gradients.cases import losses, oracle
from tests.runs import losses_of, network, private_run, train
from tests.sites import site

QUICK = settings(max_examples=40, deadline=None, derandomize=True)


def drawn(secret: bytes, vectors: int, parts: int = 3) -> dict[str, torch.Tensor]:
    names = {str(k): [f"{k}.weight"] for k in range(parts)}
    return Alone(names, dict.fromkeys(names, 1.0)).chosen(secret, vectors)


@QUICK
@given(st.binary(min_size=1, max_size=40), st.integers(0, 50), st.integers(1, 7))
def test_every_vector_is_in_one_part(secret: bytes, vectors: int, parts: int) -> None:
    found = drawn(secret, vectors, parts)
    assert list(found) == [str(k) for k in range(parts)]
    assert torch.stack(list(found.values())).sum(0).tolist() == [1] * vectors
    assert all(torch.equal(found[k], again) for k, again in drawn(secret, vectors, parts).items())


def test_parts_are_drawn_uniformly_and_independently() -> None:
    n = 30_000
    found = torch.stack(list(drawn(b"a secret", n).values())).int().argmax(0)
    pairs = Counter((found[:-1] * 3 + found[1:]).tolist())
    chi2 = sum((pairs[k] - n / 9) ** 2 / (n / 9) for k in range(9))
    assert chi2 < 40  # 8 degrees of freedom: passed with probability 1 - 3e-6
    other = torch.stack(list(drawn(b"another", n).values())).int().argmax(0)
    assert abs(float((found == other).double().mean()) - 1 / 3) < 5 * math.sqrt(2 / 9 / n)


def test_without_a_secret_nothing_is_drawn() -> None:
    on = small_model()
    clipper = PerExample(1.0, RandomLayer()).attach(site(on))
    assert clipper.draws
    with pytest.raises(StepError, match="secret"):
        clipper.clipped_sum(losses(on, (rows(3),)))


@pytest.mark.slow
@QUICK
@given(st.sampled_from(METHODS), st.sampled_from(["clip", "normalize"]), st.floats(0.01, 5), st.integers(0, 50))
def test_the_sum_is_that_of_the_definition(method: str, mode: str, C: float, seed: int) -> None:
    on, x = small_model(), rows(7, seed)
    clipper = PerExample(C, RandomLayer(), method=method, mode=mode).attach(site(on))
    clipper.secret = blake2b(b"%d" % seed).digest()
    found = clipper.clipped_sum(losses(on, (x,)))
    truth = oracle(small_model(), (x,))
    chosen = drawn(clipper.secret, 7)
    for number, (h, names) in enumerate(LAYERS.items()):
        norms = torch.cat([truth[n].flatten(1) for n in names], 1).norm(dim=1)
        nu = (C / norms).clamp(max=1) if mode == "clip" else C / (norms + 0.01 * C)
        nu = nu * chosen[str(number)]
        assert clipper.bounds[number].name == h and clipper.bounds[number].sensitivity == C
        for n in names:
            torch.testing.assert_close(found[n], torch.einsum("b,b...->...", nu, truth[n]), rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_the_mean_over_draws_is_the_layerwise_clipped_mean() -> None:
    """Each part holds a third of the examples, and is divided by a third of the expected size."""
    on, x, C, rounds = small_model(), rows(10), 0.1, 2000
    clipper = PerExample(C, RandomLayer()).attach(site(on))
    assert clipper.divisor == pytest.approx(10 / 3)
    per_layer = PerExample(dict.fromkeys(LAYERS, C), "layer").attach(site(on))
    assert per_layer.divisor == 10
    expected = per_layer.clipped_sum(losses(on, (x,)))
    total = {n: torch.zeros_like(p) for n, p in on.named_parameters()}
    for k in range(rounds):
        clipper.secret = b"%d" % k
        for n, t in clipper.clipped_sum(losses(on, (x,))).items():
            total[n] += t / clipper.divisor / rounds
    for n, t in expected.items():
        # A coordinate of one example is at most C; ten of them, each there or not.
        assert float((total[n] - t / 10).abs().max()) < 5 * C * math.sqrt(2 * 10 / rounds) / (10 / 3)


def test_every_part_has_all_of_the_multiplier() -> None:
    on, private = private_run(clipping=PerExample(0.8, RandomLayer()), noise_multiplier=0.7)
    assert len(private.parts()) == 2
    for p in private.parts():
        assert p.alone and p.sensitivity == 0.8 and p.noise_std == pytest.approx(0.7 * 0.8)
    assert effective_multiplier(private.parts()) == pytest.approx(0.7)
    assert private.noise_multiplier == 0.7
    train(on, private, 3)


def test_each_piece_of_a_batch_draws_for_itself() -> None:
    """And each step, from the key of the run."""
    seen: list[bytes] = []
    clipping = PerExample(0.8, RandomLayer())
    on, private = private_run(network(), clipping=clipping, max_physical_batch_size=2, sampling="fixed-size")
    honest = private._context.clipper.clipped_sum

    def watching(*arguments: torch.Tensor) -> dict[str, torch.Tensor]:
        seen.append(private._context.clipper.secret)
        return honest(*arguments)

    private._context.clipper.clipped_sum = watching  # type: ignore[method-assign, assignment]
    for batch in private.loader.pieces():
        private.step(losses_of(on, batch))
    assert len(seen) == 5 * 4 and len(set(seen)) == len(seen) and all(len(s) >= 16 for s in seen)
