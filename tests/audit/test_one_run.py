"""Many canaries in a single run."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from clipwise import Batch, PerExample, audit
from clipwise.audit.trial import run_of
from clipwise.errors import ConfigurationError
from clipwise.noise import gaussian, mechanism
from tests.audit.bug import Subject, losses

CANARIES = 200


def wide(**options: Any) -> Subject:
    """A layer with an entry for each of 200 canaries, in one step that every record takes part in."""
    torch.manual_seed(0)
    batch = torch.randn(CANARIES, 50), torch.randint(8, (CANARIES,))
    chosen: dict[str, Any] = {
        "clipping": PerExample(max_norm=1.0, method="instantiate"),
        "sampling": "full",
        "sample_rate": None,
        "steps": 1,
        "noise_multiplier": 0.5,
    }
    return run_of(nn.Linear(50, 8), losses, batch, **{**chosen, **options})


def test_one_run_gives_a_positive_bound_below_the_true_value() -> None:
    report = audit.one_run(*wide(), canaries=CANARIES)
    report.require()
    assert report.measured.runs == 1
    assert 1.0 < report.measured.epsilon < report.claim.epsilon
    assert 0.2 < report.measured.mu < report.claim.mu == pytest.approx(2.0, rel=1e-3)


def test_a_sampled_run_of_several_steps() -> None:
    subject = wide(sampling="poisson", sample_rate=0.5, steps=3)
    report = audit.one_run(*subject, canaries=CANARIES)
    report.require()
    assert 0.2 < report.measured.epsilon < report.claim.epsilon


def test_noise_that_is_far_too_small_is_ruled_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def smaller(key: bytes, sums: Sequence[Tensor], stds: Sequence[float], divisor: float) -> None:
        gaussian.add_gaussian(key, sums, [std / 200 for std in stds], divisor)

    monkeypatch.setattr(mechanism, "add_gaussian", smaller)
    report = audit.one_run(*wide(noise_multiplier=2.0), canaries=CANARIES, confidence=0.999)
    assert not report.ok and report.measured.right == report.measured.guesses


def test_guesses_without_a_canary_are_random() -> None:
    """The audit's own random bits decide which canaries are in, and not the data."""
    inside = np.random.default_rng(0).random(CANARIES) < 0.5
    assert 60 < inside.sum() < 140
    report = audit.one_run(*wide(noise_multiplier=1e6), canaries=CANARIES)
    assert report.measured.epsilon == report.measured.mu == 0.0


@pytest.mark.parametrize("canaries", [1, 201, True])
def test_an_invalid_number_of_canaries_is_refused(canaries: int) -> None:
    with pytest.raises(ConfigurationError, match="canaries must be"):
        audit.one_run(*wide(), canaries=canaries)


def test_more_canaries_than_entries_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="give fewer canaries"):
        audit.one_run(*wide(), canaries=CANARIES, parameter="bias")


def test_clipped_microbatches_take_one_canary() -> None:
    with pytest.raises(ConfigurationError, match="one canary per run"):
        audit.one_run(*wide(clipping=Batch(max_norm=1.0)), canaries=2)
