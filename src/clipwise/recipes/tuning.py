"""The recipes of `clipwise tune`: the demo's network on the digits."""

from __future__ import annotations

from itertools import chain, islice, repeat

import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clipwise.clipping import PerExample
from clipwise.engine.make_private import make_private
from clipwise.recipes.demo import DELTA, one_thread
from clipwise.recipes.digits import digits
from clipwise.recipes.small_cnn import small_cnn
from clipwise.tune.subject import Choice, Range, Recipe, Run, Settings

_MOMENTUM = 0.9
_VALIDATION_EVERY = 5


def _train(settings: Settings, seed: int) -> Run:
    """One private run, scored on every fifth record of the training part, which it is not trained on.

    The seed is for the initial weights only. It is published, so noise and batches do not use it.
    """
    train, validation = _parts()
    rate, epochs = settings["sample_rate"], settings["epochs"]
    steps = max(1, round(epochs / rate))
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = small_cnn()
        optimizer = torch.optim.SGD(model.parameters(), settings["learning_rate"], _MOMENTUM)
        with make_private(
            model,
            optimizer,
            train,
            clipping=PerExample(max_norm=settings["max_norm"]),
            sample_rate=rate,
            steps=steps,
            noise_multiplier=settings["noise_multiplier"],
            delta=DELTA,
        ) as private:
            for x, y in islice(chain.from_iterable(repeat(private.loader)), steps):
                private.step(F.cross_entropy(model(x), y, reduction="none") if len(x) else None)
            spent = private.spent()
            release = (private.noise_multiplier, rate, spent.steps)
        x, y = validation.tensors
        with torch.no_grad():
            right = int((model(x).argmax(1) == y).sum())
    return Run(right, len(y), model, spent.epsilon, release)


def _parts() -> tuple[TensorDataset, TensorDataset]:
    """Split by position alone, which costs no privacy."""
    tensors = digits(train=True).tensors
    is_validation = torch.arange(len(tensors[0])) % _VALIDATION_EVERY == 0
    return TensorDataset(*(t[~is_validation] for t in tensors)), TensorDataset(*(t[is_validation] for t in tensors))


RECIPES = {
    "digits": Recipe(
        "digits",
        {
            "noise_multiplier": Range(0.8, 8, log=True),
            "max_norm": Range(0.1, 2, log=True),
            "sample_rate": Range(0.05, 0.5, log=True),
            "learning_rate": Range(0.05, 1, log=True),
            "epochs": Choice((5, 10, 20, 40)),
        },
        DELTA,
        _train,
    )
}
