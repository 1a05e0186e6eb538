"""Black-box membership inference: the attacker sees only the losses of the trained model.

This weak attack shows the risk of an ordinary record rather than the worst case. The result is the true-positive rate
at low false-positive rates, because an attack with good average accuracy may still identify no record with certainty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clipwise.accounting.gaussian import Array
from clipwise.audit.planted import MakeRun, RunWatch, train
from clipwise.errors import ConfigurationError
from clipwise.noise.key import NoiseKey
from clipwise.privacy import Adjacency, Unit
from clipwise.sampling.base import Indices
from clipwise.sampling.batch_structure import evaluating
from clipwise.validation.arguments import whole

if TYPE_CHECKING:
    from clipwise.engine.context import StepContext

RATES = (0.001, 0.01, 0.1)
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Membership:
    """How well an attack distinguishes members from other records."""

    attack: str
    found: dict[float, float]  # true-positive rate at each false-positive rate
    auc: float  # the probability that a member scores higher than a non-member
    members: int  # how many were scored
    others: int

    def __str__(self) -> str:
        at = ", ".join(f"{100 * tpr:.3g}% at {100 * fpr:g}%" for fpr, tpr in self.found.items())
        scored = f"{self.members} members, {self.others} others"
        return f"{self.attack}: finds {at} false alarms, AUC {self.auc:.3f} ({scored})"


def curve(attack: str, members: Array, others: Array, rates: Sequence[float] = RATES) -> Membership:
    """The result for scores, where larger means "member". Each threshold is a quantile of the others' scores."""
    if not len(members) or not len(others):
        raise ConfigurationError("members and others: give at least one score of each.")
    rising, found = np.sort(others), {}
    for rate in rates:
        alarms = math.floor(rate * len(others))
        found[rate] = float((members > rising[-1 - alarms]).mean()) if alarms < len(others) else 1.0
    auc = (np.searchsorted(rising, members, "left") + np.searchsorted(rising, members, "right")).mean()
    return Membership(attack, found, float(auc) / (2 * len(others)), len(members), len(others))


def loss_threshold(member_losses: Array, other_losses: Array) -> Membership:
    """Attack that classifies records with a small loss as members."""
    return curve("loss threshold", -np.asarray(member_losses), -np.asarray(other_losses))


def likelihood_ratio(losses_MN: Array, is_member_MN: Bools) -> Membership:
    """Attack on the first model: a record is a member if its loss is likelier under models trained on it than others.

    The losses of a record under the other models, with it and without it, are modelled as two normal distributions
    with a spread shared by all records, because there are few models per record. The score is the log-likelihood
    ratio of the loss under the first model.

    Args:
        losses_MN: losses of N records under M models.
        is_member_MN: which records each model was trained on.
    """
    losses, member = losses_MN[1:], is_member_MN[1:]
    usable_N = (member.sum(0) >= 2) & ((~member).sum(0) >= 2)
    if not usable_N.any():
        raise ConfigurationError("models: too few to estimate the loss of a record with it and without it; give more.")
    log_densities = []
    for side in (member, ~member):
        mean_N = np.where(side, losses, 0).sum(0) / np.maximum(side.sum(0), 1)
        residual = np.where(side, losses - mean_N, 0.0)[:, usable_N]
        freedom = side[:, usable_N].sum() - usable_N.sum()
        spread = max(float(np.sqrt((residual**2).sum() / max(freedom, 1))), 1e-12)
        log_densities.append(-0.5 * ((losses_MN[0] - mean_N) / spread) ** 2 - math.log(spread))
    score_N = log_densities[0] - log_densities[1]
    is_member_N = is_member_MN[0]
    return curve("likelihood ratio", score_N[usable_N & is_member_N], score_N[usable_N & ~is_member_N])


def membership(
    make_run: MakeRun, dataset: Any, loss: Callable[..., Tensor], *, models: int = 16, seed: int = 0
) -> tuple[Membership, Membership]:
    """Train models on random halves of the records, and run both attacks on the first model.

    Args:
        make_run: as in `neighbours`; each model is trained on half of the records, without the others in its batches.
        dataset: the records.
        loss: `loss(model, *batch)` returns one loss per example.
        models: the number of models; the first is attacked, the others serve as reference.
        seed: the seed of the halves and of the keys.
    """
    whole("models", models, least=6)
    random = np.random.default_rng(seed)
    is_member_MN = random.random((models, len(dataset))) < 0.5
    losses_MN = np.zeros(is_member_MN.shape)
    for number in range(models):
        half = _Half(NoiseKey.from_seed(seed, f"clipwise.membership/{number}".encode()), is_member_MN[number])
        run = train(make_run, dataset, half, seed + number)
        pieces = np.array_split(np.arange(len(dataset)), -(-len(dataset) // 256))
        with evaluating(run.model), torch.no_grad():
            found = [loss(run.model, *run.loader.fetcher[piece]).double().numpy(force=True) for piece in pieces]
        losses_MN[number] = np.concatenate(found)
    target = is_member_MN[0]
    return (loss_threshold(losses_MN[0][target], losses_MN[0][~target]), likelihood_ratio(losses_MN, is_member_MN))


class _Half(RunWatch):
    """A run restricted to some of the records."""

    def __init__(self, key: NoiseKey, is_member_N: Bools) -> None:
        self._key, self._is_member_N = key, is_member_N

    def begins(self, run: StepContext) -> NoiseKey:
        if run.event.adjacency is Adjacency.REPLACE_ONE or run.event.unit is not Unit.RECORD:
            raise ConfigurationError(
                "membership leaves records out of batches, which needs zero-out adjacency of single records: use a "
                "run with Poisson, shuffled or full batches."
            )
        self.follow(run)
        return self._key

    def kept(self, run: StepContext, drawn: Indices) -> Indices:
        return drawn[self._is_member_N[drawn]]
