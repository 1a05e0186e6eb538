"""StepContext: the state of a run, shared by eager and compiled steps. The pipeline of a step is in step.py."""

from __future__ import annotations

import os
from typing import Any, NoReturn

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from clipwise.clipping import Clipper, noised_parts
from clipwise.clipping.base import Parameters, Split
from clipwise.engine import describe, observer
from clipwise.engine.plan import Plan
from clipwise.errors import LedgerError, StepError
from clipwise.gradients.real_views import dimension
from clipwise.ledger import multi_run
from clipwise.ledger.file_format import new_tag
from clipwise.ledger.ledger import FileLedger
from clipwise.ledger.planned_run import awaiting_training
from clipwise.noise.key import NoiseKey, StepKeys
from clipwise.noise.secure import on_grid
from clipwise.privacy import Part
from clipwise.sampling.loader import Piece, PrivateLoader
from clipwise.sampling.microbatches import ByUser
from clipwise.validation import training_loop
from clipwise.validation.coupling import IndependenceProbe
from clipwise.validation.first_batches import Loss, ReplacementTest
from clipwise.validation.step_guard import StepGuard
from clipwise.validation.training_loop import LoopWarnings
from clipwise.validation.verified_weights import VerifiedWeights


class StepContext:
    """The state of a private run.

    Attributes:
        plan: the resolved arguments of `make_private`. It never changes.
        parts: the parts of the next release, with their noise.
        tag: the name under which the run charges the ledger.
        keys: the secrets of the coming steps.
        ranks: the processes of the run.
        layout: how the model is divided among them.
        weights: verifies that only releases change the model.
        guard: checks around a step that the model did not change in a way that breaks the bound.
        loop: warnings about the user's training loop.
        independence: tests the first batches by gradients at the inputs; None if that is switched off.
        tests: replacement tests of the first batches, one for each loss that clipwise can call.
        handed: the last batch that the loader yielded, while tests are pending.
        loader: yields the batches.
        observer: an audit that sees the sums; None for every other run.
        partial: the sum over the pieces of the current batch so far, and the clipping bounds it was formed with.
        in_step: whether a step is in progress or has failed.
        is_described: whether the ledger has an up-to-date description of this run.
        process: the process that made the run. A fork of it must not step.
        is_seeded: whether a seed was given; then no guarantee is claimed.
        must_load: whether the ledger holds another run, which only `load_state_dict` can continue.
        is_followed: whether the averages contain the last release.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.model, self.optimizer, self.parameters = plan.model, plan.optimizer, plan.parameters
        self.strategy, self.clipper, self.scheme = plan.strategy, plan.clipper, plan.scheme
        self.event, self.ledger, self.parts = plan.event, plan.ledger, plan.parts
        self.process, self.is_seeded = os.getpid(), plan.seed is not None
        # A run that released nothing, or nothing but the preparation of its data, has no checkpoint.
        planned = awaiting_training(plan.ledger)
        self.must_load = plan.ledger.existing and plan.ledger.position > 0 and planned is None
        self.ranks, self.layout = plan.ranks, plan.layout
        given = None if self.must_load else plan.seed
        own = NoiseKey.fresh() if given is None else NoiseKey.from_seed(given)
        key, self.tag = self.key_of_rank_0(own), self.ranks.from_rank_0(new_tag)
        if planned is not None:
            self.tag = planned.run
        self.keys = StepKeys(key, plan.scheme.steps_per_epoch)
        multi_run.require_unused(key.id, plan.ledger)
        plan.ledger.enter(self.tag, self)
        self.observer = observer.current()
        self.is_followed = True
        self.in_step = False
        self.partial: tuple[dict[str, Tensor], object] | None = None
        other: StepContext | None = training_loop.require_alone(self, plan.parameters)
        self.weights: VerifiedWeights = VerifiedWeights(plan, None if other is None else other.weights.state)
        self.guard = StepGuard(
            self.weights.state.inventory,
            plan.parameters,
            is_coupled=plan.strategy.is_coupled,
            has_local_update=plan.strategy.has_local_update,
            used=plan.layout.used,
        )
        self.loop = LoopWarnings(plan.model, plan.optimizer)
        self.independence = IndependenceProbe() if plan.probe else None
        self.tests: list[ReplacementTest] = []
        self.handed: Any = None
        self.is_described = False
        self.described_strategy: dict[str, Any] = {}
        if plan.loss is not None and not plan.strategy.is_coupled:
            self.plan_test(plan.loss)
        self.step_hooks: list[RemovableHandle] = []
        self.loader: PrivateLoader

    def key_of_rank_0(self, own: NoiseKey) -> NoiseKey:
        """The key of rank 0, on every rank: all draw the same batches and the same noise."""
        if self.ranks.count == 1:
            return own
        return NoiseKey(*self.ranks.from_rank_0(lambda: (own.secret_bytes(), own.id)))

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to copy and to pickle: two runs with one key would add the same noise to two sums."""
        raise StepError(
            "A private run cannot be copied or pickled: it holds the secret of its noise, and a copy would add that "
            "noise to other sums. To continue elsewhere, save private.state_dict(), call private.close() and load it "
            "into a new run; to send a model, send model.state_dict()."
        )

    def require_loaded(self) -> None:
        """Raise if the ledger holds another run."""
        if self.must_load:
            where = str(self.ledger.path) if isinstance(self.ledger, FileLedger) else "The ledger"
            raise LedgerError(
                f"{where} holds another run ({self.ledger.position} releases). To continue that run, call "
                "load_state_dict with its checkpoint. To begin a new run, give a new ledger path. To begin a new run "
                "whose privacy cost is added to that of the old one, give FileLedger(path, join=True)."
            )

    def require_no_local_update(self, called: str) -> None:
        """Raise if the strategy computes its own losses."""
        if self.strategy.has_local_update:
            raise StepError(
                f"{called} takes no losses with Batch(..., local_update=f), which computes its own: call "
                "private.step_local_update(batch) with the batch from private.loader."
            )

    def made(self) -> int:
        """The number of releases that the run has charged."""
        return self.ledger.made(self.tag)

    def which(self, piece: Piece) -> tuple[int, int]:
        """Identifies a piece of a batch within the run. A piece that is drawn again has the same identity."""
        return self.made(), piece.index_in_batch

    @property
    def users(self) -> ByUser | None:
        """The records of each user, if users are protected."""
        return self.plan.cut if isinstance(self.plan.cut, ByUser) else None

    @property
    def views(self) -> int:
        """The number of rows that the loader yields for each example."""
        return 1 if self.plan.views is None else self.plan.views.count

    def plan_test(self, loss: Loss) -> ReplacementTest:
        """Plan a test of the first batches with this loss; the ledger records the plan."""
        test = ReplacementTest(self.model, loss, self.plan.views, self.independence is not None)
        self.tests.append(test)
        self.is_described = False
        return test

    def current_parts(self) -> list[Part]:
        """The parts of the next release."""
        # The parts of a drawn batch are fixed, and this method must not change weights.
        is_fixed = self.weights.is_closed or self.loader.is_awaiting or self.clipper.moves_weights
        is_fixed = is_fixed or self.ranks.count > 1  # other ranks may not be here
        if not is_fixed:
            self.follow_weights(is_updated=False)
        return list(self.parts)

    def set_parts(self) -> None:
        """Recompute the noise from the clipping bounds. The event, and so the multiplier, does not change."""
        z, noise = self.event.noise_multiplier, self.plan.noise
        self.parts = parts_of(self.clipper, self.parameters, z, self.strategy.split, noise)

    def follow_weights(self, is_updated: bool) -> None:
        """Recompute bounds and noise from the current weights and clipping constants."""
        if self.clipper.follow(is_updated):
            self.set_parts()
            if self.plan.averages is not None and self.clipper.moved:
                self.plan.averages.scale(self.clipper.moved)
            if self.described_strategy != describe.public_strategy(self):
                self.is_described = False  # constants have changed, and the ledger must have them


def parts_of(clipper: Clipper, parameters: Parameters, multiplier: float, split: Split, noise: str) -> tuple[Part, ...]:
    """The parts of a clipper's release. Secure noise adds the rounding of the sums to the sensitivity."""
    parts = noised_parts(clipper.bounds, parameters, multiplier, split, clipper.divisor)
    if noise != "secure":
        return parts
    beside = {b.name: b.size or 1 for b in clipper.bounds if not b.parameters}  # a count is one number
    return on_grid(parts, beside | {name: dimension(p) for name, p in parameters.items()})
