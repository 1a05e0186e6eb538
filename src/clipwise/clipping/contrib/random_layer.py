"""One random layer per example: an example moves one part, so the parts need not share the noise multiplier."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clipwise.clipping.base import Site
from clipwise.clipping.grouping import Groups, Policy, described_groups, group_parameters
from clipwise.clipping.thresholds import Constants
from clipwise.errors import StepError


@dataclass(frozen=True)
class RandomLayer(Policy):
    """Each example (or mini-set) takes part in one of the K parts, drawn uniformly and for each step anew.

    Its gradient in that part is clipped at C = max_norm; in the others it counts as 0. A part so holds the gradients
    of L / K examples on average, and the noised sum is divided by L / K: the mean over the draw is the
    layerwise clipped mean gradient.

    Args:
        groups: the parts: "layer", "tensor", or lists of names.

    Guarantee:
        A unit moves one part only, by at most S_k = C or 2 C as the strategy says. The draws do not depend on the
        records, so neighbours may be compared at equal draws (a replaced record's two vectors are then in one
        part): there the release is a Gaussian mechanism with multiplier s_k / S_k, and a mixture of such over
        draws that stay secret is no worse than the worst of them. The step's multiplier is min_k s_k / S_k: every
        part has all of it, and no sqrt(K) is paid. No amplification by the draw is claimed.
    """

    groups: Groups = "layer"

    def constants(self, max_norm: float, site: Site) -> Constants:
        """For one model."""
        groups = group_parameters(self.groups, site.parameters, "RandomLayer: groups")
        return Alone(groups, dict.fromkeys(groups, float(max_norm)))

    def describe(self) -> dict[str, Any]:
        """The rule in plain types."""
        return {"rule": "random layer", "groups": described_groups(self.groups)}


class Alone(Constants):
    """`RandomLayer` for one model."""

    alone = True

    def __init__(self, groups: dict[str, list[str]], norms: dict[str, float]) -> None:
        super().__init__(groups, norms)
        self.share = 1 / len(groups)  # of the vectors are expected in each part

    def chosen(self, secret: bytes, vectors: int) -> dict[str, Tensor]:
        """Which vectors each part holds; every vector is in exactly one."""
        if not secret:
            raise StepError(
                "RandomLayer needs a secret to draw from, and the run has set none: this is a mistake."
            )
        digest = blake2b(secret, digest_size=16, person=b"clipwise.layer").digest()
        random = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
        drawn = torch.from_numpy(random.integers(len(self.groups), size=vectors))
        return {part: drawn == number for number, part in enumerate(self.groups)}
