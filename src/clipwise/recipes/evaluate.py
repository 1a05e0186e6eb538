"""The accuracy of a trained model: an exact figure on public rows, or a noised release on private rows.

On private rows one joint Gaussian mechanism releases everything: each row adds a vector of norm at most 1 to the sums

    classification   (correct, wrong) of its group: 1 in one place
    regression       (squared error, no target): the error, as a share of the declared range, is at most 1, and a row
                     without a target has no error

The number of rows is public. Counts of correct rows are whole numbers, and so are their noised values (counts.py). An
interval covers the noise, with 1% of error, and the sampling of the rows, with 4%: Clopper-Pearson for counts, and the
Chernoff bound for means of values in [0, 1] (Hoeffding 1963, theorem 1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import special
from torch import Tensor, nn

from clipwise.errors import ConfigurationError
from clipwise.ledger.ledger import FileLedger
from clipwise.ledger.planned_run import plan_run
from clipwise.noise.gaussian import gaussian
from clipwise.noise.key import NoiseKey
from clipwise.privacy import Event
from clipwise.recipes.kind import Encoder, Source

CONFIDENCE = 0.95
_OF_NOISE, _OF_SAMPLING = 0.01, 0.04
_ROWS_AT_A_TIME = 1024


@dataclass(frozen=True)
class Figure:
    """A released figure, with an interval that holds the figure of the population with probability `confidence`."""

    name: str
    value: float
    low: float
    high: float
    rows: str
    group: str | None = None
    confidence: float = CONFIDENCE

    def to_dict(self) -> dict[str, Any]:
        """The figure in JSON types."""
        return asdict(self)


@dataclass(frozen=True)
class Groups:
    """The group of each row: its index in `names`, which are public."""

    names: tuple[str, ...]
    of_row: np.ndarray


def outputs_of(model: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
    """The outputs of a model for all rows, on the CPU."""
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    with torch.no_grad():
        found = [
            model(*(value[start : start + _ROWS_AT_A_TIME].to(device) for value in inputs)).cpu()
            for start in range(0, len(inputs[0]), _ROWS_AT_A_TIME)
        ]
    model.train(was_training)
    return torch.cat(found)


def scores(model: nn.Module, encoder: Encoder, source: Source, rows: np.ndarray | None = None) -> np.ndarray:
    """For each row 1 or 0 (correct or wrong), or its squared error in [0, 1] (nan without a target).

    They are as private as the rows.
    """
    *inputs, target = encoder.encode(source, rows).tensors
    output = outputs_of(model, inputs)
    if encoder.task.labels is not None:
        return (output.argmax(1) == target).numpy().astype(np.float64)
    assert encoder.task.range is not None
    low, high = encoder.task.range
    error = (output.reshape(len(target)).clamp(low, high).double() - target.clamp(low, high)) / (high - low)
    found: np.ndarray = (error * error).clamp(max=1.0).numpy()
    return found


def exact_figures(
    encoder: Encoder, score_N: np.ndarray, groups: Groups | None = None, rows: str = "public-test"
) -> list[Figure]:
    """Figures without noise, for public rows or for a run without privacy."""
    sums, names = _sums(encoder, score_N, groups)
    return _figures(encoder, sums, names, len(score_N), 0.0, rows)


def noised_figures(
    encoder: Encoder,
    score_N: np.ndarray,
    event: Event,
    ledger: Path,
    *,
    epsilon: float,
    delta: float,
    groups: Groups | None = None,
    seed: int | None = None,
    rows: str = "held-out",
) -> list[Figure]:
    """Charge one release on private rows to a new ledger, and return its figures."""
    sums, names = _sums(encoder, score_N, groups)
    key = NoiseKey.fresh() if seed is None else NoiseKey.from_seed(seed, b"evaluation")
    with FileLedger(ledger, header={"dataset_size": len(score_N)}) as opened:
        opened.charge(event, plan_run(opened, event, 1, epsilon, delta, seeded=seed is not None, key=key.id))
        noise = gaussian(key.derive("evaluation"), sums.size, event.noise_multiplier, dtype=torch.float64).numpy()
        noise = noise if encoder.task.labels is None else np.rint(noise)
    key.wipe()
    return _figures(encoder, sums + noise.reshape(sums.shape), names, len(score_N), event.noise_multiplier, rows)


def groups_of(source: Source, encoder: Encoder, column: str | None, rows: np.ndarray | None) -> Groups | None:
    """The groups of rows by a column whose categories are declared or already released; None without a column."""
    if column is None:
        return None
    names, of_row = encoder.groups(source, column, rows)
    return Groups(tuple(names), np.asarray(of_row))


def _sums(encoder: Encoder, score_N: np.ndarray, groups: Groups | None) -> tuple[np.ndarray, tuple[str, ...]]:
    """One row per group with (correct, wrong), or (sum of squared errors, rows without a target).

    A record adds a vector of norm at most 1.
    """
    if encoder.task.labels is None:
        if groups is not None:
            raise ConfigurationError("--groups is for classification: the error of a regression has no groups yet.")
        return np.array([[np.nansum(score_N), np.isnan(score_N).sum()]], np.float64), ()
    names = () if groups is None else groups.names
    group_N = np.zeros(len(score_N), np.int64) if groups is None else groups.of_row
    if len(names) and (group_N.min(initial=0) < 0 or group_N.max(initial=0) >= len(names)):
        raise ConfigurationError("A row is in none of the groups.")
    counts = np.zeros((max(1, len(names)), 2))
    np.add.at(counts, (group_N, np.where(score_N == 1, 0, 1)), 1.0)
    return counts, names


def _figures(
    encoder: Encoder, sums: np.ndarray, names: tuple[str, ...], count: int, std: float, rows: str
) -> list[Figure]:
    """Figures and intervals from sums with noise of this standard deviation."""
    if encoder.task.labels is None:
        return [_error(encoder, float(sums[0, 0]), count, float(sums[0, 1]), std, rows)]
    width = _quantile(1) * std * math.sqrt(len(sums)) + _rounding(std, len(sums))
    figures = [_accuracy(float(sums[:, 0].sum()), count, width, rows)]
    for name, (correct, wrong) in zip(names, sums.tolist(), strict=False):
        figures.append(_group_accuracy(correct, wrong, std, rows, name))
    return figures


def _accuracy(correct: float, count: int, width: float, rows: str) -> Figure:
    low = _clopper_pearson(correct - width, count - (correct - width))[0]
    high = _clopper_pearson(correct + width, count - (correct + width))[1]
    return Figure("accuracy", _unit(correct / count), low, high, rows)


def _group_accuracy(correct: float, wrong: float, std: float, rows: str, group: str) -> Figure:
    """The size of a group is private, too: both counts have noise."""
    width = _quantile(2) * std + _rounding(std)
    low = _clopper_pearson(correct - width, wrong + width)[0]
    high = _clopper_pearson(correct + width, wrong - width)[1]
    total = max(correct, 0.0) + max(wrong, 0.0)
    value = max(correct, 0.0) / total if total > 0 else 0.5
    return Figure("accuracy", value, min(low, value), max(high, value), rows, group)


def _error(encoder: Encoder, total: float, count: int, missing: float, std: float, rows: str) -> Figure:
    assert encoder.task.range is not None
    size = encoder.task.range[1] - encoder.task.range[0]
    width = _quantile(2) * std
    known, fewest, most = (max(1.0, count - missing + change) for change in (0.0, -width, width))
    low = _chernoff((total - width) / most, fewest)[0]
    high = _chernoff((total + width) / fewest, fewest)[1]
    value, low, high = (size * math.sqrt(mean) for mean in (_unit(total / known), low, high))
    return Figure("root mean squared error", value, low, high, rows)


def _quantile(figures: int) -> float:
    """The noise exceeds this many standard deviations, in either direction, with probability 1% for all figures."""
    return -float(special.ndtri(_OF_NOISE / (2 * figures)))


def _rounding(std: float, counts: int = 1) -> float:
    """The most that the rounding of the noise moves a sum of counts."""
    return counts / 2 if std else 0.0


def _unit(value: float) -> float:
    return min(max(value, 0.0), 1.0)


def _clopper_pearson(correct: float, wrong: float) -> tuple[float, float]:
    correct, wrong = max(correct, 0.0), max(wrong, 0.0)
    tail = _OF_SAMPLING / 2
    low = float(special.betaincinv(correct, wrong + 1, tail)) if correct > 0 else 0.0
    high = float(special.betaincinv(correct + 1, wrong, 1 - tail)) if wrong > 0 else 1.0
    return low, high


def _chernoff(mean: float, count: float) -> tuple[float, float]:
    """The means p with count KL(mean || p) <= log(2 / error), for values in [0, 1]."""
    mean, limit = _unit(mean), math.log(2 / _OF_SAMPLING) / count
    return _boundary(mean, 0.0, limit), _boundary(mean, 1.0, limit)


def _boundary(mean: float, end: float, limit: float) -> float:
    inside, outside = mean, end
    for _ in range(60):
        middle = 0.5 * (inside + outside)
        divergence = float(special.rel_entr(mean, middle) + special.rel_entr(1 - mean, 1 - middle))
        inside, outside = (middle, outside) if divergence <= limit else (inside, middle)
    return outside
