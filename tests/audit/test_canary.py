"""How tight the bounds of an attack are, and that they do not exceed the true value."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from clipwise import Batch, PerExample, audit
from clipwise.audit.canary import measured
from clipwise.errors import AuditError, ConfigurationError
from tests.audit.bug import CONFIDENCE, losses, one_release, small
from tests.audit.inside import FULL, INSIDE, loud, weighted

FIXED: dict[str, Any] = {"sampling": "fixed-size", "sample_rate": None, "batch_size": 32, "steps": 1}

SINGLE_RELEASES = {
    "per example": one_release,
    "per layer": partial(one_release, clipping=PerExample(max_norm=1.0, parts="layer")),
    "replace-one": partial(small, **FIXED),
    "batch": partial(one_release, clipping=Batch(max_norm=1.0)),
    "microbatches": partial(one_release, clipping=Batch(max_norm=1.0, microbatches=4)),
    "batch, replace-one": partial(small, clipping=Batch(max_norm=1.0), **FIXED),
}


@pytest.mark.parametrize("mu", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("name", SINGLE_RELEASES)
def test_a_single_release_shows_three_quarters_of_mu(name: str, mu: float) -> None:
    subject = SINGLE_RELEASES[name](noise_multiplier=1 / mu)
    report = audit.canary(*subject, runs=1000, seed=2)
    assert report.measured.runs == 1000 and report.measured.guesses == 2000
    assert report.claim.mu == pytest.approx(mu, rel=1e-3)
    assert 0.75 * mu <= report.measured.mu <= mu
    assert 0 < report.measured.epsilon <= report.claim.epsilon
    assert report.ok


@pytest.mark.parametrize("mu", [1.0, 2.0, 3.0])
def test_three_quarters_of_mu_are_shown_by_99_of_100_audits(mu: float) -> None:
    """Deterministic: uses the number of right guesses of the worst audit in a hundred."""
    right = int(stats.binom.ppf(0.01, 2000, stats.norm.cdf(mu / 2)))
    inside, outside = np.ones(1000), -np.ones(1000)
    inside[: (2000 - right) // 2] = -1
    outside[: 2000 - right - (2000 - right) // 2] = 1
    claim = audit.canary(*one_release(noise_multiplier=1 / mu), runs=2).claim
    found = measured("", 1000, inside, outside, claim, 0.95)
    assert found.right == right and 0.75 * mu <= found.mu <= mu


@pytest.mark.parametrize("mu", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("name", INSIDE)
def test_a_worst_record_shows_three_quarters_where_gradients_are_bounded_inside(name: str, mu: float) -> None:
    subject, x = INSIDE[name]
    options: dict[str, Any] = {"kind": "record", "planted": loud(x), "loss": weighted, "runs": 1000}
    report = audit.canary(*subject(noise_multiplier=1 / mu, **FULL), **options)
    report.require()
    assert 0.75 * mu <= report.measured.mu <= report.claim.mu == pytest.approx(mu, rel=1e-3)


@pytest.mark.parametrize("name", INSIDE)
def test_a_dirac_canary_is_refused_where_gradients_are_bounded_inside(name: str) -> None:
    subject = INSIDE[name][0](**FULL)
    with pytest.raises(ConfigurationError, match=f"{name} bounds gradients inside the network"):
        audit.canary(*subject, runs=2)
    with pytest.raises(ConfigurationError, match=f"{name} bounds gradients inside the network"):
        audit.one_run(*subject, canaries=2)


@pytest.mark.slow
def test_a_bound_rarely_exceeds_the_true_value() -> None:
    """Ten audits at confidence 0.95: more than 4 failures have a probability of 6e-5, and the seeds are fixed."""
    reports = [audit.canary(*one_release(), runs=100, seed=seed) for seed in range(10)]
    assert sum(report.measured.mu > 1 for report in reports) <= 4
    assert all(report.measured.mu < 1.5 for report in reports)


@pytest.mark.slow
def test_a_subsampled_run_stays_within_its_claim() -> None:
    subject = small(
        clipping=PerExample(max_norm=1.0, method="vmap"), steps=3, noise_multiplier=0.5, probe_independence=False
    )
    report = audit.canary(*subject, runs=50)
    report.require()
    assert 0.3 < report.measured.mu < report.claim.mu


def test_a_mislabelled_canary_is_detected_by_its_gradient() -> None:
    for subject in (one_release(noise_multiplier=0.25), small(**FIXED, noise_multiplier=0.25)):
        report = audit.canary(*subject, kind="mislabelled", loss=losses, runs=200)
        report.require()
        assert 0.3 < report.measured.mu < 4


def test_a_given_record_is_detected_by_its_gradient() -> None:
    planted = torch.full((5,), 50.0), torch.tensor(1)
    report = audit.canary(*one_release(noise_multiplier=0.5), kind="record", planted=planted, loss=losses, runs=200)
    report.require()
    assert 0.7 < report.measured.mu < 2


def test_a_claim_that_is_too_low_is_ruled_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from clipwise.noise import gaussian, mechanism

    def smaller(key: bytes, sums: Sequence[Tensor], stds: Sequence[float], divisor: float) -> None:
        gaussian.add_gaussian(key, sums, [std / 2 for std in stds], divisor)

    monkeypatch.setattr(mechanism, "add_gaussian", smaller)
    report = audit.canary(*one_release(), runs=500, confidence=CONFIDENCE)
    assert not report.ok and report.measured.mu > 1
    with pytest.raises(AuditError, match="MORE THAN CLAIMED"):
        report.require()


def test_both_curves_are_in_one_picture(tmp_path: Any) -> None:
    report = audit.canary(*one_release(), runs=2)
    report.draw(tmp_path / "audit.svg")
    assert "measured attack" in _text(tmp_path / "audit.svg")


def _text(path: Any) -> str:
    return str(path.read_text()).replace("<!-- ", "").replace(" -->", "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "loud"}, "kind='loud'"),
        ({"kind": "mislabelled"}, "needs loss="),
        ({"kind": "record", "loss": losses}, "planted"),
        ({"planted": (1, 2)}, "planted"),
        ({"runs": 1}, "runs must be"),
        ({"runs": 20.0}, r"runs must be a whole number of at least 2, not 20\.0"),
        ({"runs": 39, "kind": "mislabelled", "loss": losses}, "at least 40"),
        ({"runs": True}, "runs must be"),
        ({"confidence": 1.0}, "confidence must be"),
        ({"record": 99}, "record must be"),
    ],
)
def test_invalid_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        audit.canary(*one_release(), **{"runs": 100, **options})


def test_a_run_without_noise_or_for_users_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no noise"):
        audit.canary(*one_release(noise_multiplier=0.0), runs=2)
    users = small(clipping=Batch(max_norm=1.0), group=[i // 2 for i in range(32)])
    with pytest.raises(ConfigurationError, match="single records"):
        audit.canary(*users, runs=2)
