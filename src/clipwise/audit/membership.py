"""Black-box membership inference: the attacker sees the trained model's losses, and nothing of the training.

A weak attack shows little about the worst case and much about an ordinary one. It is reported as the share of members
that are found at few false alarms, since an attack that is right on average may still be sure of no record.
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
from clipwise.audit.watch import MakeRun, RunWatch, train
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
    """How well members are distinguished from others."""

    attack: str
    found: dict[
        float, float
    ]  # the share of members found (TPR), by the false-alarm rate (FPR) that is accepted
    auc: float  # the probability that a member scores higher than a record that is none
    members: int  # how many were scored
    others: int

    def __str__(self) -> str:
        at = ", ".join(f"{100 * tpr:.3g}% at {100 * fpr:g}%" for fpr, tpr in self.found.items())
        scored = f"{self.members} members, {self.others} others"
        return f"{self.attack}: finds {at} false alarms, AUC {self.auc:.3f} ({scored})"


def curve(attack: str, members: Array, others: Array, rates: Sequence[float] = RATES) -> Membership:
    """What scores are worth; larger ones say "member". A threshold lies above all but a share of the others."""
    if not len(members) or not len(others):
        raise ConfigurationError("members and others: give scores of at least one of each.")
    falling = np.sort(others)[::-1]
    found = {}
    for rate in rates:
        alarms = math.floor(rate * len(others))
        found[rate] = float((members > falling[alarms]).mean()) if alarms < len(others) else 1.0
    rising = np.sort(others)
    auc = (np.searchsorted(rising, members, "left") + np.searchsorted(rising, members, "right")).mean()
    return Membership(attack, found, float(auc) / (2 * len(others)), len(members), len(others))


def loss_threshold(member_losses: Array, other_losses: Array) -> Membership:
    """Whose loss is small is called a member."""
    return curve("loss threshold", -np.asarray(member_losses), -np.asarray(other_losses))


def likelihood_ratio(losses_MN: Array, is_member_MN: Bools, target: int = 0) -> Membership:
    """Whose loss is likelier among models that were trained on the record than among those that were not.

    The losses of a record over the other models, with it and without it, are taken as two normal laws, with a spread
    that all records share, since there are few models a record; the target model's loss is scored by the logarithm of
    their ratio.

    Args:
        losses_MN: losses of N records under M models.
        is_member_MN: which records each model was trained on.
        target: the model that is attacked.
    """
    rest = np.arange(len(losses_MN)) != target
    losses, member = losses_MN[rest], is_member_MN[rest]
    usable_N = (member.sum(0) >= 2) & ((~member).sum(0) >= 2)
    if not usable_N.any():
        raise ConfigurationError(
            "models: too few to know how a record's loss is with it and without it; give more."
        )
    means = [np.where(side, losses, 0).sum(0) / np.maximum(side.sum(0), 1) for side in (member, ~member)]
    spreads = []
    for side, mean_N in zip((member, ~member), means, strict=True):
        residual = np.where(side, losses - mean_N, 0.0)[:, usable_N]
        freedom = side[:, usable_N].sum() - usable_N.sum()
        spreads.append(max(float(np.sqrt((residual**2).sum() / max(freedom, 1))), 1e-12))
    score_N = _log_normal(losses_MN[target], means[0], spreads[0]) - _log_normal(
        losses_MN[target], means[1], spreads[1]
    )
    is_member_N = is_member_MN[target]
    return curve("likelihood ratio", score_N[usable_N & is_member_N], score_N[usable_N & ~is_member_N])


def membership(
    make_run: MakeRun, dataset: Any, loss: Callable[..., Tensor], *, models: int = 16, seed: int = 0
) -> tuple[Membership, Membership]:
    """Train models on random halves of the records, and attack the first of them by both attacks.

    Args:
        make_run: as in `neighbours`; each model is trained on half of the records, by leaving the others out of draws.
        dataset: the records.
        loss: `loss(model, *batch)` gives one loss an example.
        models: how many are trained; the first is attacked, the others show what losses are usual.
        seed: of the halves and of the keys.
    """
    whole("models", models, least=6)
    random = np.random.default_rng(seed)
    is_member_MN = random.random((models, len(dataset))) < 0.5
    losses_MN = np.zeros(is_member_MN.shape)
    for number in range(models):
        half = _Half(NoiseKey.from_seed(seed, f"clipwise.membership/{number}".encode()), is_member_MN[number])
        run = train(make_run, dataset, half, seed + number)
        losses_MN[number] = _losses_of_all(run, loss, len(dataset))
    target = is_member_MN[0]
    return (
        loss_threshold(losses_MN[0][target], losses_MN[0][~target]),
        likelihood_ratio(losses_MN, is_member_MN),
    )


class _Half(RunWatch):
    """A run that only some of the records take part in."""

    def __init__(self, key: NoiseKey, is_member_N: Bools) -> None:
        self._key, self._is_member_N = key, is_member_N

    def begins(self, run: StepContext) -> NoiseKey:
        if run.event.adjacency is Adjacency.REPLACE_ONE or run.event.unit is not Unit.RECORD:
            raise ConfigurationError(
                "membership leaves records out of draws, which zero-out of single records allows: use a run with "
                "Poisson, shuffled or full batches."
            )
        self.follow(run)
        return self._key

    def kept(self, run: StepContext, drawn: Indices) -> Indices:
        return drawn[self._is_member_N[drawn]]


def _losses_of_all(run: StepContext, loss: Callable[..., Tensor], records: int) -> Array:
    """Of every record, under the trained model."""
    with evaluating(run.model), torch.no_grad():
        pieces = np.array_split(np.arange(records), -(-records // 256))
        found = [loss(run.model, *run.loader._fetcher[piece]).double().numpy(force=True) for piece in pieces]
    return np.concatenate(found)


def _log_normal(x: Array, mean: Array, spread: float) -> Array:
    return -0.5 * ((x - mean) / spread) ** 2 - math.log(spread)
