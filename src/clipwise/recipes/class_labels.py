"""Labels of images and texts: declared, public by the layout of the data, or released as noised counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from clipwise.errors import ConfigurationError
from clipwise.recipes.counts import threshold

if TYPE_CHECKING:
    from clipwise.recipes.counts import NoisedCounts

NO_LABEL = -1  # target of a record whose label is missing or not among the labels: it adds nothing to a training step
_BYTES = 256
# For labels of known domain: noise alone shows one of the 256 in less than one run of 100,000.
_STANDARD_DEVIATIONS = 5.5


def require_labels(labels: Sequence[str]) -> tuple[str, ...]:
    """The labels, if they are two or more different texts."""
    given = tuple(str(label) for label in labels)
    if len(given) < 2:
        raise ConfigurationError("labels: at least two are needed, such as two sub-folders or two values of --labels.")
    if len(set(given)) < len(given):
        raise ConfigurationError("labels: give each label once.")
    return given


def released_labels(values: Sequence[str | None], counts: NoisedCounts | None, bytes_only: bool) -> tuple[str, ...]:
    """The labels with enough records, from noised counts of these records.

    Args:
        values: the label of each record; None if it has none.
        counts: the release. It is charged before any noise is drawn.
        bytes_only: whether the format allows the labels 0 to 255 only. Then their domain is public.
    """
    if counts is None:
        raise ConfigurationError(
            "The labels are not declared: give --labels, or a share of the budget for their counts."
        )
    std = counts.std_of(["labels"])["labels"]
    least = max(1.0, _STANDARD_DEVIATIONS * std) if bytes_only else threshold(std, counts.delta)
    if len(values) < least:  # their number is public
        raise ConfigurationError(
            f"With {len(values)} training record{'s' * (len(values) != 1)} and this budget, noised counts cannot show "
            "the labels: give --labels."
        )
    if bytes_only:
        bins = np.array([NO_LABEL if value is None else int(value) for value in values], np.int64)
        released = counts.release({"labels": (bins, _BYTES)})
        found = [str(label) for label, count in enumerate(released.histograms["labels"]) if count >= least]
    else:
        found = list(counts.release({}, {"labels": list(values)}).strings["labels"])
    if len(found) < 2:
        raise ConfigurationError(
            "The noised counts show fewer than two labels: the records have a single one, or there are too few records "
            "for this budget. If there are others, declare the labels: --labels A,B,..."
        )
    return tuple(found)


def targets(values: Sequence[str | None], labels: Sequence[str]) -> Tensor:
    """The position of each label, int64; NO_LABEL where it is missing or not among the labels."""
    place = {label: position for position, label in enumerate(labels)}
    return torch.tensor([NO_LABEL if v is None else place.get(v, NO_LABEL) for v in values], dtype=torch.int64)


def label_losses(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of each record; 0 where it has no label."""
    return F.cross_entropy(output, target, reduction="none", ignore_index=NO_LABEL)
