"""Audits by one canary over many runs, and by many canaries in a single run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clipwise.accounting.gaussian import Array
from clipwise.audit.bounds import (
    at_least,
    at_most,
    epsilon_in_one_run,
    epsilon_of_errors,
    mu_in_one_run,
    mu_of_accuracy,
    p_value_of_curve,
)
from clipwise.audit.planted import Dirac, MakeRun, Planted, Record
from clipwise.audit.report import AuditReport, Claim, Measured
from clipwise.audit.trial import with_record
from clipwise.errors import AuditError, ConfigurationError
from clipwise.noise.key import NoiseKey
from clipwise.privacy import Adjacency, Entry
from clipwise.validation.arguments import number, one_of, whole

KINDS = ("dirac", "mislabelled", "record")
# Thresholds on the log-likelihood ratio, fixed in advance: none is chosen from the scores.
THRESHOLDS = (-8.0, -6.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0)
_FOR_MU = 0.8  # share of the failure probability: mu uses one test, epsilon all thresholds
# Runs of each world that only fit the distribution of the scores of an ordinary record: a share, and a minimum.
_PILOT_SHARE, _PILOTS = 0.05, 20


def canary(
    make_run: MakeRun,
    dataset: Any,
    *,
    kind: str = "dirac",
    loss: Callable[..., Tensor] | None = None,
    record: int = 0,
    planted: Any = None,
    parameter: str | None = None,
    runs: int = 1000,
    delta: float | None = None,
    confidence: float = 0.95,
    seed: int = 0,
) -> AuditReport:
    """Train many times with a canary and as often without, and bound from below how well the two are distinguished.

    The attacker is the one of the guarantee: it sees every release and knows the model, the data and the canary, but
    neither the noise nor the sampled batches. Each run uses the whole engine.

    mu is bounded from the accuracy of the guess at log-likelihood ratio 0: with as many runs "in" as "out",
    TPR + TNR <= 2 Phi(mu / 2), and the upper tail of the number of right guesses is at most that of a binomial with
    this mean (Hoeffding 1956), which gives a Clopper-Pearson bound. epsilon is bounded from Clopper-Pearson bounds on
    both error rates at a few thresholds fixed in advance. The claim is ruled out if either exceeds what its trade-off
    curve allows.

    Args:
        make_run: as in `neighbours`.
        dataset: the records; one of them is the canary.
        kind: "dirac", the worst-case gradient, inserted into the losses; "mislabelled", the record with another label;
            or "record", the one given as `planted`. The last two are detected by their gradient, which needs `loss`.
            Strategies that bound gradients by the model's structure need one of these two.
        loss: `loss(model, *batch)` returns one loss per example.
        record: the index of the canary.
        planted: the canary, for kind="record".
        parameter: the parameter with the entry of a Dirac canary, instead of the largest of each parameter group.
        runs: the model is trained `runs` times with the canary and `runs` times without. If a run is one release that
            every record takes part in, its sum is the same each time and is computed once; only the noise is redrawn.
        delta: the delta of the bound on epsilon; by default that of the run.
        confidence: the probability with which all bounds hold jointly.
        seed: the seed of the keys, and of torch's generator before each run.
    """
    one_of("kind", kind, KINDS)
    if (kind == "record") != (planted is not None):
        raise ConfigurationError("planted is for kind='record' only, which requires it: give both or neither.")
    if kind != "dirac" and loss is None:
        raise ConfigurationError(f"kind={kind!r} needs loss=: loss(model, *batch) returns one loss per example.")
    whole("runs", runs, least=least_runs(kind))
    number("confidence", confidence, least=0.5, below=1)
    whole("record", record, least=0, most=len(dataset) - 1)
    if kind == "mislabelled":
        planted = mislabelled(dataset, record)
    data = dataset if planted is None else with_record(dataset, record, planted)

    def watch(key: NoiseKey, inside: bool, again: Sequence[NoiseKey]) -> Planted:
        place, is_inside = np.array([record]), np.array([inside])
        if kind == "dirac":
            return Dirac(key, place, is_inside, again, parameter=parameter)
        return Record(key, place, is_inside, again, loss=loss, home=data)

    worlds = _Worlds(make_run, data, dataset, watch, seed)
    inside_scores, outside_scores = worlds.scores(runs)
    claim = Claim(worlds.history(), worlds.watches[0].delta if delta is None else delta)
    if kind != "dirac":
        # Log-likelihood ratios of two normal distributions, fitted to the first runs, which are then dropped.
        pilots = max(_PILOTS, int(_PILOT_SHARE * len(inside_scores)))
        ours, theirs = inside_scores[:pilots], outside_scores[:pilots]
        spread = max(float(np.std(np.concatenate([ours - ours.mean(), theirs - theirs.mean()]))), 1e-12)
        middle, slope = (ours.mean() + theirs.mean()) / 2, (ours.mean() - theirs.mean()) / spread**2
        inside_scores, outside_scores = ((s[pilots:] - middle) * slope for s in (inside_scores, outside_scores))
    return AuditReport(claim, measured(f"{kind} canary", runs, inside_scores, outside_scores, claim, confidence))


def measured(attack: str, runs: int, inside: Array, outside: Array, claim: Claim, confidence: float) -> Measured:
    """Bounds from the scores of equally many runs with and without the canary."""
    n, failure = len(inside), 1 - confidence
    right = int((inside > 0).sum() + (outside <= 0).sum())
    accuracy = at_least(right, 2 * n, _FOR_MU * failure)
    each = (1 - _FOR_MU) * failure / (2 * len(THRESHOLDS))
    epsilon, exceeds = 0.0, accuracy > claim.curve.accuracy()
    for threshold in THRESHOLDS:
        false_positive = at_most(int((outside > threshold).sum()), n, each)
        false_negative = at_most(int((inside <= threshold).sum()), n, each)
        epsilon = max(epsilon, epsilon_of_errors(false_positive, false_negative, claim.delta))
        exceeds = exceeds or false_negative < claim.curve(false_positive)
    return Measured(attack, runs, 2 * n, right, epsilon, mu_of_accuracy(accuracy), confidence, exceeds)


def mislabelled(dataset: Any, record: int) -> Any:
    """The record with another label: its last value, a whole number, becomes the next class."""
    try:
        *inputs, label = dataset[record]
        classes = max(int(dataset[i][-1]) for i in range(len(dataset))) + 1
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            "kind='mislabelled' needs records with a label, a whole number, as their last entry."
        ) from error
    other = (int(label) + 1) % max(classes, 2)
    return (*inputs, torch.as_tensor(label).new_tensor(other) if isinstance(label, Tensor) else other)


def least_runs(kind: str) -> int:
    """The least number of runs per world; for a record, the first ones only fit the scale of the scores."""
    return 2 if kind == "dirac" else 2 * _PILOTS


@dataclass
class _Worlds:
    """Runs with and without the canary, alternating."""

    make_run: MakeRun
    inside: Any  # the data set with the canary, and the one without if the canary is left out of every batch
    outside: Any  # the data set of the other world under replace-one
    # From a key, whether the canary is in, and further keys for noising each release again.
    make_watch: Callable[[NoiseKey, bool, Sequence[NoiseKey]], Planted]
    seed: int
    watches: list[Planted] = field(default_factory=list)
    _histories: list[list[Entry]] = field(default_factory=list)

    def scores(self, runs: int) -> tuple[Array, Array]:
        """Scores of `runs` runs with the canary and as many without."""
        self._run()
        self._run()
        first = self._histories[0]
        if sum(entry.count for entry in first) == 1 and first[0].event.sample_rate == 1:
            # One step that every record takes part in: the sum is always the same, and only the noise is redrawn.
            for world in range(2):
                self._run([self._key(number) for number in range(4 + world, 2 * runs, 2)])
        else:
            while len(self.watches) < 2 * runs:
                self._run()
        found = [np.array([s[0] for w in self.watches[world::2] for s in (w.scores, *w.more)]) for world in (0, 1)]
        return found[0][:runs], found[1][:runs]

    def history(self) -> tuple[Entry, ...]:
        """The events charged by every run, which must be the same."""
        first = self._histories[0]
        if any(other != first for other in self._histories):
            raise AuditError(
                "make_run charges different events from one call to the next: an audit compares runs with the same "
                "events."
            )
        return tuple(first)

    def _key(self, number: int) -> NoiseKey:
        return NoiseKey.from_seed(self.seed, f"clipwise.canary/{number}".encode())

    def _run(self, again: Sequence[NoiseKey] = ()) -> None:
        number = len(self.watches)
        is_inside = number % 2 == 0
        watch = self.make_watch(self._key(number), is_inside, again)
        is_replaced = bool(number) and self._histories[0][0].event.adjacency is Adjacency.REPLACE_ONE
        data = self.outside if is_replaced and not is_inside else self.inside
        self._histories.append(watch.trained(self.make_run, data, self.seed))
        self.watches.append(watch)


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
