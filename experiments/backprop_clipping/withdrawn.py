"""The setting that the authors withdrew, as published and with correct noise.

The paper's noise sigma is for gradients that are bounded by C1 C2 per layer. Its code clipped gradients of the *mean*
loss of B images to C2, and divided the noise by B as if they were gradients of a sum. On the scale of the sum that is
a clip to C2 B, which never clips, with the same sigma. So the engine can run both and account for each:

    as published    upstream gradients of single examples clipped to C2 B, noise sigma on the sum
    honest          upstream gradients of single examples clipped to C2, noise sigma on the sum
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import partial

import torch

import clipwise
from clipwise import accounting, layers
from experiments.backprop_clipping.claims import CLAIMS, DELTA, Claim
from experiments.backprop_clipping.sets import DIGITS, Images
from experiments.backprop_clipping.training import judged, piece_of, plain_network
from experiments.harness.limits import Deadline
from experiments.harness.store import Cell
from experiments.harness.training import losses_of, spent

KINDS = ("as published", "honest")
_QUICK = Claim(0, 0, 0, 0, 0, 0, 0.07, 2, 1.0, 0.01, 4, batch_size=200)


@dataclass(frozen=True)
class Withdrawn:
    """A run of one data set's best setting, in one of `KINDS`."""

    data: str
    kind: str

    @property
    def claim(self) -> Claim:
        """The numbers of the paper."""
        return _QUICK if self.data == DIGITS else CLAIMS[self.data]

    @property
    def epochs(self) -> int:
        """The epochs in the paper."""
        return self.claim.epochs

    @property
    def grad_norm(self) -> float:
        """C2 on the scale of one example's loss."""
        return self.claim.grad_norm * (self.claim.batch_size if self.kind == "as published" else 1)

    @property
    def noise_multiplier(self) -> float:
        """z of N parts with noise sigma each and sensitivity 2 C1 C2 (replace-one adjacency)."""
        return self.claim.noise / (2 * self.claim.input_norm * self.grad_norm * math.sqrt(self.claim.layers))

    @property
    def key(self) -> str:
        """A unique name."""
        return f"withdrawn {self.data}/{self.kind}"


def run(job: Withdrawn, images: Images, seed: int, deadline: Deadline) -> Cell:
    """Train as the paper did: disjoint batches, Adam, the same noise on every layer."""
    claim = job.claim
    start = time.perf_counter()
    model = layers.clip_inputs(
        plain_network(images, seed, "relu"), input_norm=claim.input_norm, grad_norm=job.grad_norm, bound="upstream"
    )
    private = clipwise.make_private(
        model,
        torch.optim.Adam(model.parameters(), claim.learning_rate, capturable=images.train.tensors[0].is_cuda),
        images.train,
        clipping=clipwise.Backprop(split="equal"),
        batch_size=claim.batch_size,
        sampling="shuffled",
        adjacency="replace-one",
        noise_multiplier=job.noise_multiplier,
        delta=DELTA,
        max_physical_batch_size=piece_of(images),
    )
    step = private.compiled(partial(losses_of, model))
    for _ in range(claim.epochs):
        for x, y in private.loader.pieces():
            deadline.require()
            step(x, y)
    seconds = round(time.perf_counter() - start, 2)
    accuracy, loss = judged(model, images.held_out)
    words = {"accuracy": accuracy, "loss": round(loss, 5), "seconds": seconds, "steps": private.steps}
    return words | {"claimed_epsilon": claim.epsilon, "noise": claim.noise} | spent(private)


def epsilon_of_last_layer(claim: Claim) -> float:
    """A lower bound on the epsilon of the withdrawn code: that of the last layer alone, under zero-out adjacency.

    The gradient of the logits has norm at most sqrt(2), and comes near that when the network is sure of a wrong class;
    the layer's input has norm at most C1. So leaving an image out changes the layer by up to sqrt(2) C1, under noise
    sigma.
    """
    return accounting.epsilon(
        noise_multiplier=claim.noise / (math.sqrt(2) * claim.input_norm),
        sampling="shuffled",
        period=1,
        steps=claim.epochs,
        delta=DELTA,
    )
