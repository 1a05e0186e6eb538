"""diffprivlib's logistic regression on the tables that the defaults are judged on.

It needs diffprivlib and the scikit-learn that it supports, in an environment of their own:
`pip install diffprivlib "scikit-learn<1.6"`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from clipwise.recipes.tables import defaults
from experiments.recipes.table_runs import JUDGED_ON, Prepared, prepared

STRENGTHS = (1.0, 1e-2, 1e-4)  # diffprivlib's C, of which 1 is its default


def versions() -> dict[str, str]:
    """The software of the comparison."""
    return {name: version(name) for name in ("diffprivlib", "scikit-learn")}


def judged(folder: Path, epsilons: tuple[float, ...], seeds: int) -> Iterator[dict[str, Any]]:
    """Its defaults, and the best of several regularizations on the held-out rows, with epsilon for training alone."""
    for name in JUDGED_ON:
        for epsilon in epsilons:
            found = [
                _accuracies(prepared(folder, name, epsilon, defaults.COUNTS_SHARE, seed), epsilon, seed)
                for seed in range(seeds)
            ]
            for run, chosen in (("defaults", lambda each: each[0]), ("best of three regularizations", max)):
                yield {
                    "table": name,
                    "epsilon": epsilon,
                    "run": f"diffprivlib's logistic regression, {run}",
                    "accuracies": [round(chosen(each), 4) for each in found],
                }


def _accuracies(data: Prepared, epsilon: float, seed: int) -> list[float]:
    """The accuracy on the held-out rows for each strength. The inputs are those of clipwise and cost nothing here.

    The norm of a row is at most the square root of the number of columns, as each has inputs of norm at most 1.
    """
    from diffprivlib.models import LogisticRegression

    x, y = (tensor.numpy() for tensor in data.train.tensors)
    x, y = x[y >= 0], y[y >= 0]
    found = []
    for strength in STRENGTHS:
        model = LogisticRegression(
            epsilon=epsilon, data_norm=math.sqrt(len(data.encoder.schema.columns)), C=strength, random_state=seed
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some solutions do not converge in its 100 iterations
            model.fit(x, y)
        found.append(float((model.predict(data.x.numpy()) == data.y.numpy()).mean()))
    return found
