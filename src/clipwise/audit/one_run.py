"""Audit by many canaries in a single run, each included independently with probability 1/2."""

from __future__ import annotations

from typing import Any

import numpy as np

from clipwise.audit.bounds import epsilon_in_one_run, mu_in_one_run, p_value_of_curve
from clipwise.audit.planted import Dirac
from clipwise.audit.recorder import MakeRun
from clipwise.audit.report import AuditReport, Claim, Measured
from clipwise.noise.key import NoiseKey
from clipwise.validation.arguments import number, whole

# The share of the m canaries that are guessed, those with the clearest scores. Fixed in advance.
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

    The first records of the data set become canaries, each with its own entry of a parameter, and each takes part with
    probability 1/2. The attacker guesses from the releases whether the canaries with the clearest scores took part.
    The number of right guesses is bounded for every (epsilon, delta)-private run (`bounds.p_value_in_one_run`). The
    bound on mu uses all (epsilon, delta) of a Gaussian mechanism. Both are weaker than those of `canary`, but need
    only one run.

    Args:
        make_run: as in `neighbours`; it runs once.
        dataset: the records; the first `canaries` of them are canaries.
        canaries: m; at most the number of entries of the largest parameter of each parameter group.
        parameter: the parameter with the canaries' entries, instead of the largest of each parameter group.
        delta: the delta of the bound on epsilon; by default that of the run.
        confidence: the probability with which all bounds hold jointly.
        seed: the seed of the key, and of which canaries take part.
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
        found.append(Measured("one run of many canaries", 1, 2 * half, right, epsilon, mu, confidence, exceeds))
    return AuditReport(claim, max(found, key=lambda m: (m.exceeds, m.mu, m.epsilon)))
