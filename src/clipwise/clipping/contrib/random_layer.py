"""One random layer per example, so that the parts do not divide the noise multiplier."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clipwise.clipping.base import Site
from clipwise.clipping.thresholds import Constants, Groups, Policy, described_groups, group_parameters
from clipwise.errors import StepError


@dataclass(frozen=True)
class RandomLayer(Policy):
    """Each example (or microbatch) contributes to one of K parts, drawn uniformly in each step.

    Its gradient in that part is clipped to C = max_norm, and is 0 in the others. A part has L / K examples on average,
    and the noised sum is divided by L / K: in expectation this is the layerwise clipped mean gradient.

    Args:
        groups: the parts: "layer", "tensor", or lists of names.

    Guarantee:
        - Sensitivity: a unit changes one part only, by at most S_k = C or 2 C, depending on the strategy.
        - The draws do not depend on the records, so neighbours are compared at equal draws (both vectors of a replaced
          record are in the same part). Given the draw, the release is a Gaussian mechanism with multiplier s_k / S_k.
          A mixture over secret draws is no worse than the worst of them.
        - The multiplier of the step is min_k s_k / S_k, without a factor sqrt(K). No amplification by the draw is
          claimed.
    """

    groups: Groups = "layer"

    def constants(self, max_norm: float, site: Site) -> Constants:
        groups = group_parameters(self.groups, site.parameters, "RandomLayer: groups")
        return Alone(groups, dict.fromkeys(groups, float(max_norm)))

    def describe(self) -> dict[str, Any]:
        return {"rule": "random layer", "groups": described_groups(self.groups)}


class Alone(Constants):
    """`RandomLayer` for one model."""

    alone = True

    def __init__(self, groups: dict[str, list[str]], norms: dict[str, float]) -> None:
        super().__init__(groups, norms)
        self.share = 1 / len(groups)  # expected fraction of the vectors in each part

    def chosen(self, secret: bytes, vectors: int) -> dict[str, Tensor]:
        """The vectors of each part; every vector is in exactly one."""
        if not secret:
            raise StepError("RandomLayer has no secret key to draw from: this is an internal error, please report it.")
        digest = blake2b(secret, digest_size=16, person=b"clipwise.layer").digest()
        random = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
        drawn = torch.from_numpy(random.integers(len(self.groups), size=vectors))
        return {part: drawn == number for number, part in enumerate(self.groups)}
