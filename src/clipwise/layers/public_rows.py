"""Public rows, and how they are run through a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from clipwise.errors import ConfigurationError


def as_rows(public: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The arguments of a call of the model on public rows, detached from whatever made them."""
    rows = (public,) if isinstance(public, Tensor) else public
    is_rows = isinstance(rows, (tuple, list)) and all(isinstance(x, Tensor) and x.dim() for x in rows)
    if not is_rows or not rows:  # in this order: not everything can say whether it is empty
        raise ConfigurationError(
            "public must be a tensor of rows as the model takes them, or a tuple of tensors for several arguments, not "
            f"{type(public).__name__}."
        )
    if len({len(x) for x in rows}) > 1 or len(rows[0]) < 2:
        raise ConfigurationError(
            "public must hold two rows or more, as many in each tensor: statistics of one row say nothing."
        )
    if not all(bool(torch.isfinite(x).all()) for x in rows):
        raise ConfigurationError(
            "public holds values that are not finite: leave those rows out, or statistics would not be."
        )
    return tuple(x.detach() for x in rows)


def placed(rows: tuple[Tensor, ...], at: Tensor) -> tuple[Tensor, ...]:
    """On the device and, if they are no ids, in the precision of a tensor of the model."""
    return tuple(x.to(at) if x.is_floating_point() else x.to(at.device) for x in rows)
