"""The true epsilon of each setting in the paper, also of those that were not run here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from torch import nn

from clipwise import accounting
from experiments import models
from experiments.batch_clipping import appendix
from experiments.batch_clipping.figures import FIGURES
from experiments.batch_clipping.setting import Setting
from experiments.batch_clipping.strategies import joint_multiplier, number_of_parts

RECORDS = {"cifar10": 45_000, "mnist": 54_000}  # without the public tenth


@dataclass(frozen=True)
class Budget:
    """One setting of the paper.

    Attributes:
        setting: the training setting.
        epochs: the number in the paper.
        parts: L, the number of noised parts.
        figures: the figures that show it.
        multiplier: z = sigma / sqrt(L).
        epsilon: by PLD, or an upper bound by participations if z is too small for PLD; for batches of fixed size and
            replace-one adjacency.
        flat_epsilon: the same if the whole gradient were one part with the same sigma.
    """

    setting: Setting
    epochs: int
    parts: int
    figures: tuple[str, ...]
    multiplier: float
    epsilon: float
    flat_epsilon: float


@cache
def budgets() -> tuple[Budget, ...]:
    """A line for each noise, batch size, network and number of epochs; epsilon depends on nothing else."""
    found: dict[tuple[object, ...], tuple[Setting, int, list[str]]] = {}
    for figure in FIGURES:
        for row in figure.rows:
            s = row.setting
            if s.parts != "enhanced" or s.sigma is None:
                continue
            epochs = row.epochs_in_paper or s.epochs
            key = (s.data, s.model, s.norm == "none", s.sigma, s.batch_size, epochs)
            figures = found.setdefault(key, (s, epochs, []))[2]
            if figure.name not in figures:
                figures.append(figure.name)
    return tuple(_budget(setting, epochs, tuple(figures)) for setting, epochs, figures in found.values())


def _budget(setting: Setting, epochs: int, figures: tuple[str, ...]) -> Budget:
    model = _model(setting.model, setting.norm)
    flat = setting.but(parts="all")
    multiplier = joint_multiplier(setting, model)
    return Budget(
        setting,
        epochs,
        number_of_parts(setting, model),
        figures,
        multiplier,
        _epsilon(setting, epochs, multiplier),
        _epsilon(flat, epochs, joint_multiplier(flat, model)),
    )


@cache
def _model(name: str, norm: str) -> nn.Module:
    return models.build(name, norm=norm)


def _epsilon(setting: Setting, epochs: int, multiplier: float) -> float:
    records = RECORDS[setting.data]
    return accounting.epsilon(
        noise_multiplier=multiplier,
        sample_rate=setting.batch_size / records,
        steps=epochs * -(-records // setting.batch_size),
        delta=appendix.DELTA,
        sampling="fixed-size",
    )
