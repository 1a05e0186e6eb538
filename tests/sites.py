"""Sites to which tests attach a strategy: ten of a thousand records, for any model."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from clipwise.clipping import Site
from clipwise.privacy import Adjacency, Sampling, Unit
from clipwise.sampling.schemes import make_scheme


def site(
    on: nn.Module | Mapping[str, nn.Parameter],
    adjacency: Adjacency = Adjacency.ZERO_OUT,
    unit: Unit = Unit.RECORD,
    sampling: Sampling | None = None,
) -> Site:
    """Return the site of a model or of parameters; by default with a sampling that fits the adjacency."""
    model = on if isinstance(on, nn.Module) else nn.Module()
    parameters = {name: p for name, p in on.named_parameters() if p.requires_grad} if isinstance(on, nn.Module) else on
    if sampling is None:
        sampling = Sampling.FIXED_SIZE if adjacency is Adjacency.REPLACE_ONE else Sampling.POISSON
    return Site(model, parameters, adjacency, unit, make_scheme(sampling, dataset_size=1000, batch_size=10))
