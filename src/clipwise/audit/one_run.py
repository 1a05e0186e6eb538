"""Many canaries in a single run, each in or out by a coin of its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from clipwise.audit.bounds import epsilon_in_one_run, mu_in_one_run, p_value_of_curve
from clipwise.audit.planted import Dirac
from clipwise.audit.report import AuditReport, Claim, Measured
from clipwise.audit.watch import MakeRun
from clipwise.noise.key import NoiseKey
from clipwise.validation.arguments import number, whole

# Of m canaries, how many are guessed: those that the attacker is surest of. Fixed beforehand.
SHARES = (1.0, 0.5, 0.25, 0.1, 0.05, 0.02)


def one_run(
    make_run: MakeRun,
    dataset: Any,
    *,
    canaries: int = 500,
    parameter: str | None = None,
    delta: float | None = None,
    confidence: float = 0.95,
    seed: int = 0,
) -> AuditReport:
    """Bound from below what one training run reveals, with many Dirac canaries at once.

    The first records of the data set become canaries with an entry of their own; each takes part with probability
    1/2. From what the run released, whether the most conspicuous canaries took part is guessed; how many guesses can
    be right is bounded for every (epsilon, delta)-private run (`bounds.p_value_in_one_run`). The bound on mu goes
    through all (epsilon, delta) of a Gaussian mechanism. Both are weaker than those of `canary`, at the price of one
    run.

    Args:
        make_run: as in `neighbours`; it runs once.
        dataset: the records; the first `canaries` of them are canaries.
        canaries: m; at most as many as the largest parameter of each part has entries.
        parameter: where the canaries' entries are, in place of the largest parameter of each part.
        delta: at which epsilon is bounded; by default that of the run.
        confidence: with which all bounds hold together.
        seed: of the coins and of the key.
    """
    whole("canaries", canaries, least=2, most=len(dataset))
    number("confidence", confidence, least=0.5, below=1)
    inside = np.random.default_rng(seed).random(canaries) < 0.5
    key = NoiseKey.from_seed(seed, b"clipwise.one-run")
    watch = Dirac(key, np.arange(canaries), inside, parameter=parameter)
    history = watch.trained(make_run, dataset, seed)
    claim = Claim(tuple(history), watch.delta if delta is None else delta)
    failure = (1 - confidence) / len(SHARES)
    found: list[Measured] = []
    order = np.argsort(watch.scores, kind="stable")
    for share in SHARES:
        half = max(1, round(share * canaries / 2))
        right = int((~inside[order[:half]]).sum() + inside[order[canaries - half :]].sum())
        epsilon = epsilon_in_one_run(2 * half, right, canaries, claim.delta, failure)
        mu = mu_in_one_run(2 * half, right, canaries, failure)
        exceeds = p_value_of_curve(2 * half, right, canaries, claim.curve.delta) <= failure
        found.append(
            Measured("one run of many canaries", 1, 2 * half, right, epsilon, mu, confidence, exceeds)
        )
    return AuditReport(claim, max(found, key=lambda m: (m.exceeds, m.mu, m.epsilon)))
