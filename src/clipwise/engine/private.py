"""Private: the five stages of a private step around a model and an optimizer.

    sample -> bound -> noise -> record -> update

The engine wires and orders; it holds no mathematics. What belongs to one step lives in that step. `make_private`, in
make.py, makes one.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from clipwise import accounting
from clipwise.clipping.contrib.sparse import without
from clipwise.engine import checkpoint, fingerprint, observer
from clipwise.engine.compiled import CompiledStep
from clipwise.engine.observer import watched
from clipwise.engine.plan import Plan
from clipwise.errors import (
    BudgetExhausted,
    CheckpointError,
    ConfigurationError,
    LedgerError,
    PrivacyWarning,
    StepError,
)
from clipwise.gradients import opaque
from clipwise.ledger import combined_runs, crash_points, multi_run
from clipwise.ledger.file_format import new_tag
from clipwise.ledger.ledger import FileLedger
from clipwise.noise import generators
from clipwise.noise.gaussian import NoiseKey
from clipwise.noise.mechanism import noised_sums
from clipwise.noise.parts import parts_of
from clipwise.noise.release import in_order_of, laid_as
from clipwise.optim.averaging import AveragedParameters
from clipwise.optim.penalty import add_penalty
from clipwise.privacy import (
    Part,
    Sampling,
    Spent,
)
from clipwise.report import statement, wording
from clipwise.report.run_description import About, versions
from clipwise.report.statement import Statement
from clipwise.sampling import (
    ByUser,
    Fetcher,
    Piece,
    PrivateLoader,
)
from clipwise.validation import run_guards, step_inputs, training_loop
from clipwise.validation.arguments import number, one_of, plain
from clipwise.validation.coupling import IndependenceProbe
from clipwise.validation.first_batches import Loss, ReplacementTest, recommend_check
from clipwise.validation.inventory import Inventory
from clipwise.validation.model_state import ModelState


class Private:
    """A private training run. Made by `make_private`; see there.

    Attributes:
        loader: hands out the batches of an epoch, one item per step. A batch may be empty, and counts all the same:
            `step(None)` takes its step without a forward pass.
        optimizer: the user's own, unchanged.
    """

    def __init__(self, plan: Plan) -> None:
        self.optimizer = plan.optimizer
        self._model, self._parameters, self._dataset = plan.model, plan.parameters, plan.dataset
        self._scheme, self._strategy, self._clipper = plan.scheme, plan.strategy, plan.clipper
        self._users = plan.cut if isinstance(plan.cut, ByUser) else None
        self._parts, self._event, self._noise = plan.parts, plan.event, plan.noise
        self._public_statistics, self._views = plan.public_statistics, plan.views
        self._averages, self._penalty = plan.averages, plan.penalty
        self._taken_in = 0  # updates, by the averages
        self._budget, self._delta = plan.budget, plan.delta
        self._planned, self._multiplier = plan.planned, plan.multiplier
        self._ledger, self._resume_file = plan.ledger, plan.resume_file
        self._seeded = plan.seed is not None
        # A run that released nothing has nothing to go on with.
        self._must_load = (
            isinstance(plan.ledger, FileLedger) and plan.ledger.existing and plan.ledger.position > 0
        )
        self._key = (
            NoiseKey.fresh() if plan.seed is None or self._must_load else NoiseKey.from_seed(plan.seed)
        )
        self._key_is_new = True  # the ledger does not have its id
        combined_runs.require_unused(self._key.id, plan.ledger)
        self._tag = new_tag()  # under which this run charges the ledger
        plan.ledger.enter(self._tag, self)
        self._watch = observer.current()  # an audit that looks on
        self._epoch_secret, self._slot = b"", 0
        self._followed = 0  # releases of this run whose update was taken in by what follows the weights
        self._in_step = False  # a batch is being used, or a step on it has failed
        self._partial: dict[str, Tensor] | None = None  # what was gathered of a batch, under these bounds:
        self._partial_bounds = self._clipper.bounds
        self._released = training_loop.ReleasedGradients(plan.parameters)
        self._released.remember()  # what an earlier run left in .grad: nobody uses it
        self._named = {name for name, _ in plan.model.named_parameters()}
        self._buffers = step_inputs.BufferGuard(plan.model)
        self._hands = run_guards.Watch(plan.model, plan.optimizer)
        other = run_guards.require_alone(self, plan.parameters)
        self._state: ModelState = ModelState(plan.model) if other is None else other._state
        self._changed_before = plan.changed_before  # since the run before, which trained the same model
        self._has_foreign_step = self._is_own_step = False
        self._warned: set[str] = set()
        self._unverified: str | None = None  # why the weights were not verified when the run was closed
        self._independence = IndependenceProbe() if plan.probe else None
        self._loss, self._tests = plan.loss, list[ReplacementTest]()
        self._handed: Any = None  # the last batch, while compiled steps test it
        if plan.loss is not None and not plan.strategy.is_coupled:
            self._plan_test(plan.loss)
        self._spent_cache: dict[tuple[int, float, str], float] = {}
        self._described = False
        self._told_strategy: dict[str, Any] = {}
        self._closed = False
        self._step_hooks: list[RemovableHandle] = training_loop.watch_steps(plan.optimizer, self)
        self.loader = PrivateLoader(
            plan.scheme if self._watch is None else watched(plan.scheme, partial(self._watch.kept, self)),
            Fetcher(plan.dataset, plan.collate_fn),
            self._secrets_ahead,
            cut=plan.cut,
            prepare=self._hand_out,
            **plan.loader_options,
        )
        if self._watch is not None:
            self._key, self._seeded = self._watch.begins(self), True  # it has a key of its own
        self._hands.is_reproducible = self._seeded

    # ----------------------------------------------------------------- the step

    def step(self, losses: Tensor | None, outputs: Tensor | None = None) -> bool:
        """`backward(losses)`, then `optimizer.step()` when the batch is complete.

        Returns whether the optimizer stepped: False after a piece of a batch that is not its last.
        """
        return self._updated(self._backward(losses, outputs))

    def step_sets(self, batch: Any) -> bool:
        """The step of a strategy with a `local_update`, which is called on the batch; then as `step`.

        Args:
            batch: the mini-set that `loader` handed out last, perhaps moved to another device.

        Returns:
            Whether the optimizer stepped: False after a mini-set that is not the last of its batch.
        """
        piece = self._require_open().awaited()
        if not self._strategy.has_local_update:
            raise StepError(
                "private.step_sets is for a strategy with a local update, such as Batch(..., local_update=f): call "
                "private.step(losses)."
            )
        self._begin(piece)
        clipped = self._clipper.clipped_update(batch) if piece.size else self._clipper.nothing()
        self._require_untouched()  # the update has a copy to work on
        return self._updated(self._gather(piece, clipped))

    def backward(self, losses: Tensor | None, outputs: Tensor | None = None) -> bool:
        """Write the private gradient of the batch to `.grad` of every trainable parameter.

        Args:
            losses: one loss for each example of the batch that `loader` handed out last, of its own outputs and
                targets alone: what a loss takes from the targets of others, such as their mean, nobody sees. A strategy
                that clips whole mini-sets takes their mean, or a single number. None for an empty batch or an empty
                piece, which then needs no forward pass: many models cannot run on zero rows.
            outputs: what the model returned, of which the losses were computed. `Lipschitz` needs it; others do not
                look at it.

        Returns:
            Whether the batch is complete and `.grad` written. With `max_physical_batch_size` or mini-sets a
            batch comes in pieces, whose sums are gathered until the last.

        Raises:
            BudgetExhausted: if the release would pass the budget; nothing is released then.
        """
        is_complete = self._backward(losses, outputs)
        if is_complete:
            self._released.remember(keeps_sample=True)
        return is_complete

    def _backward(self, losses: Tensor | None, outputs: Tensor | None) -> bool:
        piece = self._require_open().awaited()
        self._require_no_local_update("private.step")
        if losses is None:
            return self._gather(piece, self._nothing(piece))
        if not (self._tests or self._strategy.is_coupled or self._watch):
            recommend_check()
        losses = self._over_views(losses, piece.size)
        losses = step_inputs.require_losses(losses, piece.size, self._strategy.is_coupled)
        self._begin(piece)
        if not self._described:
            training_loop.require_no_loss_scaling(losses)
        # (What a graph saved may be marked; here it is as any other tensor.)
        with opaque.explained(), torch._C.DisableTorchFunctionSubclass():
            if self._independence is not None:
                self._independence.examine(losses)
            if self._watch is not None:
                losses = self._watch.losses(self, piece, losses)
            clipped = self._clipper.sum_at_outputs(losses, outputs)
        return self._gather(piece, clipped)

    def _nothing(self, piece: Piece) -> dict[str, Tensor]:
        """The sum of a piece without records, for which no losses were computed."""
        step_inputs.require_empty(piece.size)
        self._begin(piece)
        if self._watch is not None:
            self._watch.losses(self, piece, torch.zeros(0))
        return self._clipper.nothing()

    def _begin(self, piece: Piece) -> None:
        """Before anything is computed from a piece of a batch."""
        self._require_untouched()
        self._require_budget()
        self._released.require_used()
        if piece.last:
            self._require_verified(self._state.changed_before_update())
        if self._hands.before_step():
            self._described = False  # the next release says so in the ledger
        self._released.clear()
        if self._clipper.draws:
            self._clipper.secret = self._key.derive(f"clipper/{piece.index_in_batch}")

    def _gather(self, piece: Piece, clipped: dict[str, Tensor]) -> bool:
        """Add the bounded sum of a piece; after the last one of the batch, release. Returns whether it was."""
        if piece.index_in_batch == 0 or self._partial is None:
            self._partial, self._partial_bounds = clipped, self._clipper.bounds
        elif self._clipper.bounds != self._partial_bounds:
            self._partial = None
            self.loader.reset()
            raise StepError(
                "Weights or clips were changed between two pieces of a batch, so that noise for its end would not do "
                "for its beginning. Change them between batches: private.step says when one is complete."
            )
        else:
            for name, gathered in self._partial.items():
                gathered += clipped[name]
        self.loader.consume()
        if not piece.last:
            self._in_step = False
            return False
        total, self._partial = self._partial, None
        with self._releasing():
            self._release(total)
        return True

    @contextmanager
    def _releasing(self) -> Iterator[None]:
        """Around a release. If it fails after it was charged, nobody knows how much of it was seen."""
        made = self._ledger.made(self._tag)
        try:
            yield
        except BaseException:
            self.loader.reset()  # the iterator is a step ahead of the key: going on with it would mix them up
            if self._ledger.made(self._tag) != made:
                self._ledger.doubt(self._tag)
            raise
        finally:
            self._in_step = False

    def _updated(self, is_released: bool) -> bool:
        """Let the optimizer step on what was released."""
        if is_released:
            crash_points.reached("step.before-update")
            self._update(self.optimizer.step)
        return is_released

    def _update(self, step: Callable[[], object]) -> None:
        """Update the weights by what was released; whatever that changes is a result of the release."""
        self._state.is_updating, self._released.is_unused = True, False
        try:
            step()
            self._released.remember()
            self._follow_update(has_stepped=True)  # so that the model can be evaluated as it is
        finally:
            self._state.is_updating = False
            self._state.take()

    def _before_user_step(self, has_closure: bool) -> None:
        """The optimizer is about to step, and it was not the run that called it."""
        if self._state.is_updating:
            return
        warning = training_loop.FOREIGN if has_closure else self._released.warning()
        is_foreign = warning == training_loop.FOREIGN
        self._has_foreign_step |= is_foreign
        if warning is not None and warning not in self._warned:
            self._warned.add(warning)
            warnings.warn(warning, PrivacyWarning, stacklevel=4)
        self._is_own_step = not is_foreign and not self._state.changed_before_update()

    def _after_user_step(self) -> None:
        """It has stepped. Only on released gradients, and from verified weights, is the result one of this run."""
        if self._state.is_updating:
            return
        if self._is_own_step:
            self._released.is_unused = False
            self._follow_update(has_stepped=True)
            self._state.take()
        elif self._public_statistics is not None:
            self._public_statistics.refresh(force=True)

    def _follow_update(self, has_stepped: bool = False) -> None:
        """Bring up to date what follows the released weights.

        Args:
            has_stepped: whether an optimizer has just moved them, on a released gradient. Only then averages take the
                weights in. Fused optimizers leave no trace that torch counts.
        """
        self._clipper.settle()
        made = self._ledger.made(self._tag)
        is_new = self._followed != made
        is_updated = is_new or has_stepped
        self._followed = made if has_stepped else self._followed
        if self._public_statistics is not None:
            self._public_statistics.refresh(force=is_updated)
        self._follow_weights(is_updated)
        if is_new and has_stepped and self._averages is not None:
            self._averages.update()
            self._taken_in += 1

    def _follow_weights(self, is_updated: bool) -> None:
        """Let bounds and noise follow weights and clips."""
        if self._clipper.follow(is_updated):
            self._parts = self._next_parts()
            if self._averages is not None and self._clipper.moved:
                self._averages.scale(self._clipper.moved)
            if self._told_strategy != self._strategy_to_tell():
                self._described = False  # constants were set anew: the next release says so in the ledger

    @contextmanager
    def randomness(self) -> Iterator[None]:
        """A block in which random layers, such as dropout, draw from the run's key, as secret as the noise.

            for x, y in private.loader:
                with private.randomness():
                    losses = F.cross_entropy(model(x), y, reduction="none")
                private.step(losses)

        Torch's global generators, of the CPU and of the parameters' CUDA devices, are set from the key of the step,
        whatever `torch.manual_seed` was called with, and are put back afterwards. A second block for the same batch has
        the same random numbers.
        """
        if not self._require_open().is_awaiting:
            raise StepError(
                "private.randomness() draws from the key of one step: use it inside of the loop over private.loader, "
                "around the forward pass of each batch."
            )
        piece = self.loader.awaited()
        devices = {p.device for p in self._parameters.values()}
        generators.require_known_generators(devices)
        self._hands.draws_from_key = True
        with generators.drawing_from(self._key.derive(f"randomness/{piece.index_in_batch}"), devices):
            yield

    def compiled(self, loss: Loss | None = None, size: int | None = None) -> CompiledStep:
        """A step that is captured once and replayed: `step(*batch)` in place of `step(loss(*batch))`.

        A batch that is a mapping is one argument: `step(batch)` in place of `step(loss(batch))`.

        On CUDA forward, backward, clipping, noise and update run as CUDA graphs after the first few steps: a
        small model's step is then no longer a matter of how fast Python is. Elsewhere, and where something
        cannot be captured (a warning says what), it makes ordinary steps. The result is the same.

        Args:
            loss: from the batch that `loader` hands out, `loss(*batch)`, to one loss an example. It must
                do the same at every step: a captured step does not run its Python code again. By default the one
                that `make_private` was given. The replacement test runs it on the first batches.
            size: how many examples the captured step takes; a larger batch comes in pieces, a smaller one is
                filled up with rows that weigh nothing. By default all of a batch of constant size, and 3
                standard deviations more than the mean of a random one. Mini-sets of `Batch` are taken whole.
        """
        self._require_no_local_update("private.compiled")
        loss = self._loss if loss is None else loss
        if loss is None:
            raise ConfigurationError(
                "private.compiled needs a loss: give it here, or as make_private(..., loss=...)."
            )
        return CompiledStep(self, loss, size)

    def _release(self, total: dict[str, Tensor]) -> None:
        """record, then noise, then make visible; the secret of this step is gone afterwards."""
        self._charge()
        if self._watch is None:
            noised_sums = self._noised(total)
        else:
            noised_sums = self._watch.released(self, total, self._noised)
        self._advance()
        crash_points.reached("step.before-grad")
        gradients: Mapping[str, Tensor] = noised_sums
        if self._public_statistics is not None:
            gradients = self._public_statistics.correct(noised_sums, self._parameters)
        if self._clipper.frozen:
            gradients = without(gradients, self._clipper.frozen)
        for name, p in self._parameters.items():
            p.grad = laid_as(p, gradients[name])
        if self._penalty is not None:
            add_penalty(self._penalty, self._model, self._parameters)
        self._released.remember()
        self._released.is_unused = True
        self._learn(noised_sums)
        if getattr(self._strategy, "running_statistics", None) is not None:
            self._state.take()  # layers have learned statistics from the release

    def _learn(self, means: Mapping[str, Tensor]) -> None:
        """Let the strategy adapt to what was released, and the noise to the strategy."""
        self._clipper.parts = self._parts
        if self._clipper.learn(means):
            self._parts = self._next_parts()

    def _charge(self) -> None:
        """Count a release, before any of it is visible; with the first one, say what kind of run it is of."""
        if not self._described:
            if self._key_is_new:
                combined_runs.require_unused(self._key.id, self._ledger)
            self._ledger.describe(self._about().to_dict())
            self._described, self._told_strategy = True, self._strategy_to_tell()
            self._key_is_new = False
        self._ledger.charge(self._event, self._tag, self._budget)

    def _advance(self) -> None:
        """Forget the secret of this step."""
        if self._slot == 0:
            self._epoch_secret = self._key.derive("epoch")
        self._key.advance()
        self._slot = (self._slot + 1) % self._scheme.steps_per_epoch

    def _next_parts(self) -> tuple[Part, ...]:
        """The noise follows the bounds; the event, and so the multiplier, stays."""
        return parts_of(
            self._clipper, self._parameters, self._event.noise_multiplier, self._strategy.split, self._noise
        )

    def _noised(self, total: dict[str, Tensor]) -> dict[str, Tensor]:
        for name, p in self._parameters.items():
            total[name] = in_order_of(p, total[name])
        return noised_sums(total, self._parts, self._clipper.divisor, self._key)

    # ------------------------------------------------------------- what it cost

    def spent(self, delta: float | None = None, accountant: str | None = None) -> Spent:
        """What all releases so far have cost, of all runs that share the ledger.

        Args:
            delta: by default that of the run.
            accountant: "pld", the tight one, or "rdp", a looser bound that is cheap enough for every step. By default
                "pld", and "renyi-filter" if other runs have charged the ledger as well: it holds for runs that were
                configured after releases of others were seen, the others only if all runs were fixed beforehand.
        """
        self._ledger.require_in_place()
        self._require_verified(self._state.changed())
        delta = self._delta if delta is None else number("delta", delta, above=0, below=1)
        history = self._ledger.history()
        accountant = multi_run.accountant_of(history) if accountant is None else accountant
        key = (sum(entry.count for entry in history), delta, accountant)
        if key not in self._spent_cache:
            epsilon = multi_run.epsilon_of(history, delta, accountant, self._ledger.plan)
            self._spent_cache = {key: epsilon}
        return Spent(
            epsilon=self._spent_cache[key],
            delta=delta,
            adjacency=self._event.adjacency,
            unit=self._event.unit,
            sampling=self._event.sampling,
            steps=sum(entry.count for entry in history),
            accountant=accountant,
            reproducible=self._is_reproducible(),
            assumption=multi_run.assumption_of(history, accountant),
        )

    def parts(self) -> list[Part]:
        """What the next release holds: names, sensitivity of the *sum*, noise on each coordinate."""
        # What a batch was drawn for stays; and to look must not change weights.
        if not (self._closed or self.loader.is_awaiting or self._clipper.moves_weights):
            self._follow_weights(is_updated=False)
        return list(self._parts)

    @property
    def steps(self) -> int:
        """How many releases the ledger counts so far, those of other runs that share it included."""
        return self._ledger.position

    @property
    def noise_multiplier(self) -> float:
        """z: the noise's standard deviation over the sensitivity, for all parts together."""
        return self._event.noise_multiplier

    @property
    def views(self) -> int:
        """How many rows the loader hands out for each example."""
        return 1 if self._views is None else self._views.count

    @property
    def averaged(self) -> AveragedParameters:
        """The average of the released parameters: `with private.averaged.applied(): evaluate(model)`."""
        if self._averages is None:
            raise ConfigurationError("This run keeps no averages: give make_private(..., averaged=0.999).")
        if not self._averages.is_applied:
            self._follow_update()
        return self._averages

    def on_limit(self) -> dict[str, bool]:
        """Whether each parameter's weights sit on their max_weight_norm; nothing if the strategy clips no weights.

        It follows from released weights and costs no privacy. A layer that sits there might do better with more room.
        """
        return self._clipper.on_limit()

    @property
    def divisor(self) -> float:
        """The public constant that the noised sum is divided by: the expected number of clipped vectors."""
        return self._clipper.divisor

    def tradeoff(self) -> accounting.Tradeoff:
        """What all releases so far leave to an attacker: the trade-off between false alarms and misses.

        If other runs have charged the ledger as well, it holds if all of them were fixed before the first release.
        """
        self._require_verified(self._state.changed())
        return accounting.tradeoff_of(self._ledger.history())

    def statement(self) -> Statement:
        """The privacy statement of the run so far; `clipwise statement` makes the same of a ledger file.

        Raises:
            StepError: if the model's parameters and buffers are not what the last release, or `make_private`, left.
        """
        self._ledger.require_in_place()
        changed = self._require_verified(self._state.changed(looks_inside=True))
        told = [About.from_dict(about) for about in self._ledger.about]
        if self._described:  # the last one of this run is of this sitting
            told.remove([about for about in told if about.run == self._tag][-1])
        return statement.of_releases(
            self._ledger.history(),
            self._event,
            self._delta,
            plan=self._ledger.plan,
            run=self._ledger.run,
            sittings=(*told, self._about()),
            dataset_size=self._scheme.dataset_size,
            exact=self._ledger.exact,
            declared=self._ledger.declared,
            weights=wording.CHANGED_SINCE
            if changed
            else wording.CLOSED
            if self._closed
            else wording.VERIFIED,
        )

    def declare_update(self, kind: str, reason: str) -> None:
        """Declare a change of the model's weights that no release of this run made, so that the run goes on from them.

        Nothing is verified. The ledger keeps the declaration, and every statement prints it as an assertion of yours.

        Args:
            kind: "public": computed from public data alone, such as statistics of normalization layers that were set
                from public batches; "post-processing": from released values alone, such as averaged or pruned weights.
            reason: what was changed and from what, in a few words. It is public.
        """
        one_of("kind", kind, training_loop.DECLARED)
        if not isinstance(reason, str) or not reason.strip():
            raise ConfigurationError("reason must be a text that says what was changed, and from what.")
        self._require_open()
        self._require_loaded()
        self._ledger.declare(self._tag, kind, " ".join(reason.split()))
        self._accept_weights()

    def _accept_weights(self) -> None:
        """From now on the model is as it should be."""
        self._changed_before = []
        self._has_foreign_step = self._released.is_unused = False
        self._warned.discard(training_loop.FOREIGN)
        self._state.accept()

    def _require_verified(self, changed: Sequence[str]) -> bool:
        """Refuse a model that is not what the run left, given the names of what was changed in it.

        Returns whether it is another one now that the run is closed, and was not before.
        """
        if self._closed:
            if self._unverified is not None:
                raise StepError(self._unverified)
            return bool(changed)
        changed = self._without_averages(changed) + self._changed_before
        if changed or self._has_foreign_step:
            raise StepError(training_loop.unverified(changed))
        return False

    def _without_averages(self, changed: Sequence[str]) -> list[str]:
        """Leave out what holds the averages of the run: if nobody else has updated them, they follow from releases."""
        if (
            not changed
            or self._averages is None
            or self._averages.updates != self._taken_in
            or not self._taken_in
        ):
            return list(changed)
        if not set(changed) <= self._averages.names_in_model():
            return list(changed)
        if not self._averages.is_applied:
            self._state.take()  # they were copied into the model for good
        return []

    # ------------------------------------------------- stopping and going on

    def state_dict(self) -> dict[str, Any]:
        """Optimizer, accountant, configuration and position, in types that `weights_only=True` loads.

        It holds no secret and may be published. Save the model's own `state_dict()` beside it.
        """
        self._require_own_weights()
        if self._require_verified(self._state.changed(looks_inside=True)):
            raise StepError(
                "The model was changed after the private run was closed: a checkpoint of its weights would "
                "not be of this run. Save private.state_dict() before that."
            )
        # First, for it follows the weights, and what is told below with it.
        averaged = {} if self._averages is None else {"averaged": self.averaged.state_dict()}
        state: dict[str, Any] = {
            "format": checkpoint.FORMAT,
            "run": self._ledger.run,
            "tag": self._tag,
            "position": self._ledger.position,
            "made": self._ledger.made(self._tag),
            "slot": self._slot,
            "configuration": self._configuration(),
            "fingerprint": self._fingerprint(),
            "seeded": self._is_reproducible(),
            "history": [
                {"event": e.event.to_dict(), "count": e.count, "run": e.run} for e in self._ledger.history()
            ],
            "exact": self._ledger.exact,
            "plan": None if self._ledger.plan is None else dict(self._ledger.plan),
            "optimizer": self.optimizer.state_dict(),
            "weights": self._state.save(),
            "declared": [list(update) for update in self._ledger.declared],
            **averaged,
        }
        found: dict[str, Any] = plain(state)  # a learning rate may be numpy's
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint.

        After a clean end (`close`) at the checkpoint's position, with the same configuration, data, model and
        resume file, the run goes on bit for bit as if it had never stopped. Otherwise a fresh secret is
        taken, and steps that are made again are charged again. Load the model's own state before.
        """
        self._require_open()
        history = checkpoint.history_of(state)
        self._require_fitting(state["configuration"])
        is_new = self._ledger.run != state["run"]  # then the history is brought along
        if is_new and self._ledger.position > 0:
            raise LedgerError(
                "The ledger belongs to another run than the checkpoint: give make_private the ledger that the "
                "checkpoint's run wrote."
            )
        if not is_new and self._ledger.position < state["position"]:
            raise LedgerError(
                "The ledger holds fewer releases than the checkpoint, so a part of it is missing: give "
                "make_private the complete ledger."
            )
        if differing := self._state.differing(state["weights"]):
            raise CheckpointError(
                f"The model does not hold the weights of the checkpoint: {differing[0]!r} is another. Load the model's "
                "own state before this one: model.load_state_dict(...), then private.load_state_dict(...)."
            )
        # First, because what is loaded here is a part of the configuration. Another strategy begins anew.
        strategy, mine = state["configuration"].get("strategy", {}), self._strategy.describe()
        if mine.items() <= strategy.items() and self._clipper.load_state_dict(strategy):
            self._parts = self._next_parts()
        self.optimizer.load_state_dict(dict(state["optimizer"]))
        if self._averages is not None and "averaged" in state:
            self._averages.load_state_dict(state["averaged"])
            self._taken_in = self._averages.updates
        if is_new:
            self._ledger.import_history(history, exact=state.get("exact") is True, plan=state.get("plan"))
            for kind, reason in state["declared"]:
                self._ledger.declare(self._tag, kind, reason)
        made = self._take_tag(state)
        self._slot, self._seeded = int(state["slot"]), self._seeded or bool(state["seeded"])
        now = self._fingerprint()
        secrets = checkpoint.take_secrets(self._resume_file) if self._resume_file else None
        goes_on = (
            secrets is not None
            and self._ledger.made(self._tag) == made
            and now == state["fingerprint"]
            and secrets.matches(state["run"], made, now, self._data_digest(), self._model_digest())
        )
        if secrets is not None and goes_on:
            self._key = NoiseKey.from_secret_bytes(bytes.fromhex(secrets.key), secrets.key_id)
            self._epoch_secret = bytes.fromhex(secrets.epoch)
        else:
            self._key = NoiseKey.fresh()
            self._ledger.restart(self._tag)
            if self._scheme.sampling is Sampling.SHUFFLED:
                self._slot = 0
            again = self._ledger.position - int(state["position"])
            warnings.warn(
                "The run goes on with a fresh secret: it was not stopped cleanly at this checkpoint, or its "
                "configuration, model, data or resume file are not the same (load the model's state before this one)."
                + (f" {again} releases after the checkpoint stay counted." if again else ""),
                PrivacyWarning,
                stacklevel=2,
            )
        self._described, self._key_is_new = False, is_new or not goes_on
        self._must_load, self._partial, self._in_step = False, None, False
        self._followed = self._ledger.made(self._tag)
        self._follow_weights(is_updated=False)  # those that were loaded before
        if self._public_statistics is not None:
            self._public_statistics.refresh(force=True)  # the model's own state was loaded before
        self._accept_weights()
        self.loader.reset()

    def _take_tag(self, state: Mapping[str, Any]) -> int:
        """Charge under the tag of the run that goes on, and return how many releases the checkpoint has of it.

        A run that releases something else than before was configured anew: it keeps a tag of its own, and so does one
        whose tag is in use (the run in the checkpoint is still open).
        """
        older = state["run"] if self._ledger.run != state["run"] else self._ledger.untagged
        tag = str(state.get("tag", older))
        is_same = all(entry.event == self._event for entry in self._ledger.history() if entry.run == tag)
        if tag != self._tag and is_same and self._ledger.enter(tag, self):
            self._ledger.leave(self._tag, self)
            self._tag, self._described = tag, False
        return int(state.get("made", state["position"]))

    def close(self) -> None:
        """End the run cleanly: settle the ledger and, if there is a resume file, keep the next secrets there.

        While an exception is handled, a batch that was drawn and not released stays counted as a step: what it holds
        may be why there was one.

        Raises:
            StepError: if the model's parameters and buffers are not what the last release, or `make_private`, left. The
                run is closed all the same.
        """
        self._close(sys.exc_info()[1])

    def _close(self, error: BaseException | None) -> None:
        if self._closed:
            return
        try:
            self._require_verified(self._state.changed(looks_inside=True))
        except StepError as unverified:
            self._unverified = str(unverified)
        self._closed = True
        for hook in self._step_hooks:
            hook.remove()
        try:
            self._count_broken_step(error)
            begun = not self._must_load and self._ledger.made(self._tag) > 0
            # (A forked copy has nothing to leave behind: the run and its secrets are the other process's.)
            if self._resume_file is not None and begun and not self._key.is_forked:
                checkpoint.write_secrets(self._resume_file, self._secrets())
        finally:
            self._key.wipe()
            self._epoch_secret = b""
            self.loader.reset()
            self._ledger.leave(self._tag, self, None if self._must_load else self._unverified is None)
        if self._unverified is not None:
            raise StepError(self._unverified)

    def _count_broken_step(self, error: BaseException | None) -> None:
        """Charge the batch that was drawn and not released, if there was an error that it may have led to."""
        is_open = error is not None and self.loader.has_open_batch
        has_failed = self._in_step or self.loader.is_fetching or is_open
        if not has_failed or self._must_load or self._key.is_forked or isinstance(error, BudgetExhausted):
            return
        # Nothing is released for it, so it must not pass the budget. A ledger that has failed counts its whole block.
        with suppress(BudgetExhausted, LedgerError):
            self._charge()
        self._ledger.doubt(self._tag)

    def __enter__(self) -> Private:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._close(error)
        except StepError:
            if (
                error is None
            ):  # else that error is raised; the ledger records that the weights were not verified
                raise

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Neither copy nor pickle: two runs with one key would put the same noise on two sums."""
        raise StepError(
            "A private run cannot be copied or pickled: it holds the secret of its noise, and a copy would put that "
            "noise on other sums. To go on elsewhere, save private.state_dict(), call private.close() and load it into "
            "a new run; to send a model, send model.state_dict()."
        )

    # ------------------------------------------------------------------ inside

    def _is_reproducible(self) -> bool:
        """Whether noise and samples of any release in the ledger came from a given seed."""
        return self._seeded or any(about.get("seeded") is True for about in self._ledger.about)

    def _secrets(self) -> checkpoint.Secrets:
        """What going on from here takes."""
        return checkpoint.Secrets(
            run=self._ledger.run,
            position=self._ledger.made(self._tag),
            fingerprint=self._fingerprint(),
            data=self._data_digest(),
            model=self._model_digest(),
            key=self._key.secret_bytes().hex(),
            epoch=self._epoch_secret.hex(),
            key_id=self._key.id,
        )

    def _secrets_ahead(self) -> Iterator[tuple[bytes, bytes, int]]:
        """For the steps to come: what draws the batch. Works on a copy of the key."""
        self._require_open()
        key, epoch, slot = self._key.copy(), self._epoch_secret, self._slot
        while True:
            if slot == 0:
                epoch = key.derive("epoch")
            yield key.derive("sampling"), epoch, slot
            key.advance()
            slot = (slot + 1) % self._scheme.steps_per_epoch

    def _hand_out(self, batch: Any, piece: Piece) -> Any:
        self._require_open()
        self._require_loaded()
        training_loop.require_one_process()
        self._hands.draws_from_key = False
        self._require_same_parameters(self._buffers.inventory.up_to_date())
        moves_weights = self._clipper.moves_weights or bool(self._clipper.frozen)
        self._require_verified(
            self._state.changed_before_update() if moves_weights else self._state.changed(may_wait=False)
        )
        self._follow_update()
        if moves_weights:
            self._state.take()  # weights were clipped, or frozen entries put back
        is_tested = any(test.is_pending for test in self._tests)
        self._handed = self._viewed(batch, piece) if is_tested else None
        if self._loss is not None and is_tested:
            self._tests[0].examine(
                self._handed, piece.size, self._which(piece), partial(self.loader.arrangements, piece)
            )
        self._buffers.remember(batch)
        # Marked before its views are drawn: gradients at the inputs are then those of examples.
        return self._viewed(batch if self._independence is None else self._independence.mark(batch), piece)

    def _viewed(self, batch: Any, piece: Piece) -> Any:
        """The views of a batch. Drawn twice for one piece, they are the same."""
        if self._views is None:
            return batch
        secret = self._key.derive(f"views/{piece.index_in_batch}")
        return self._views.of_batch(batch, generators.generator_from(secret))

    def _which(self, piece: Piece) -> tuple[int, int]:
        """Tells a piece from the others of this run; one that is drawn again is the same."""
        return self._ledger.made(self._tag), piece.index_in_batch

    def _plan_test(self, loss: Loss) -> ReplacementTest:
        """Let the first batches be tested with this loss; the ledger says that it was planned."""
        probes = self._independence is not None
        self._tests.append(test := ReplacementTest(self._model, loss, self._views, probes))
        self._described = False
        return test

    def _over_views(self, losses: Tensor, size: int) -> Tensor:
        """One loss an example from those of its views."""
        if self._views is None or (
            self._strategy.is_coupled and isinstance(losses, Tensor) and losses.dim() == 0
        ):
            return losses
        if not isinstance(losses, Tensor) or losses.shape != (size * self._views.count,):
            raise StepError(
                "losses must have one entry for each row that private.loader handed out: with averaged_views there "
                f"are {self._views.count} an example. Their mean is taken here."
            )
        return self._views.mean(losses)

    def _require_open(self) -> PrivateLoader:
        if self._closed:
            raise StepError("This private run is closed: make a new one to go on.")
        if self._key.is_forked:
            raise StepError(
                "This private run belongs to the process that this one was forked from. A step here would put the "
                "noise of a step there on another sum: make the private run in the process that trains."
            )
        self._require_own_weights()
        return self.loader

    def _require_own_weights(self) -> None:
        if self._averages is not None and self._averages.is_applied:
            raise StepError(
                "This is inside of a block of private.averaged.applied(), which gives the model its own weights back "
                "at its end: an update would be lost, and a checkpoint have the averages for weights. Train and "
                "save outside of it."
            )

    def _require_loaded(self) -> None:
        if self._must_load:
            raise LedgerError(
                f"{self._ledger_name()} holds another run ({self._ledger.position} releases). To go on with that "
                "run, call load_state_dict with its checkpoint; to begin a new one, give a new ledger path; to "
                "begin a new one whose cost adds to the old one's, give FileLedger(path, join=True)."
            )

    def _require_untouched(self) -> None:
        """Between two releases nobody else may have changed what is released."""
        inventory = self._buffers.inventory.up_to_date()
        if (
            not self._strategy.has_local_update
        ):  # a copy may learn what it likes; the model itself is watched below
            for name, module in inventory.statistics:
                step_inputs.require_no_statistics_in(name, module, self._strategy.is_coupled)
        self._buffers.compare_listed()
        run_guards.require_no_hooks(self._parameters)
        self._require_same_parameters(inventory)
        for name, p in self._parameters.items():
            if p.grad is not None and self._released.is_foreign(name, p.grad):
                raise StepError(
                    f"Parameter {name!r} has a gradient that private.backward did not write. If somebody called "
                    "backward() on the losses, leave that out: it is not private. If you changed .grad "
                    "after private.backward, or another private run trains this model too, call "
                    "optimizer.zero_grad() after the update."
                )

    def _require_same_parameters(self, inventory: Inventory) -> None:
        """The model has the parameters that `make_private` found, and trains the same ones."""
        for name, p in inventory.parameters:
            if p.requires_grad and name not in self._named:
                raise StepError(
                    f"Parameter {name!r} came to the model after make_private, and nothing bounds or trains it: build "
                    "the model (and clip its layers) first, then the optimizer, then make a new private run."
                )
            if p.requires_grad != (name in self._parameters):
                raise StepError(
                    f"requires_grad of parameter {name!r} was changed after make_private: make a new private run."
                )
            if p.requires_grad and p is not self._parameters[name]:
                raise StepError(
                    f"Parameter {name!r} was replaced by another object after make_private: make a new private run, "
                    "with an optimizer that holds the new one."
                )

    def _require_no_local_update(self, called: str) -> None:
        if self._strategy.has_local_update:
            raise StepError(
                f"{called} has no use for losses with Batch(..., local_update=f), which computes its own: call "
                "private.step_sets(batch) with the batch that private.loader handed out."
            )

    def _require_budget(self) -> None:
        self._in_step = False  # a refusal here has nothing to do with the batch
        if self._budget is not None:
            self._ledger.require_allowed(self._budget, self._event, self._tag)
        self._in_step = True

    def _require_fitting(self, configuration: Mapping[str, Any]) -> None:
        """A checkpoint's optimizer state must belong to such parameters and such an optimizer."""
        mine = self._configuration()
        for field in ("parameters", "optimizer"):
            if configuration.get(field) != mine[field]:
                raise CheckpointError(
                    f"The checkpoint's run has another {field} than this one: build model and optimizer as they "
                    "were there, or begin a new run."
                )

    def _fingerprint(self) -> str:
        return fingerprint.of_configuration(self._configuration())

    def _configuration(self) -> dict[str, Any]:
        """All that is public and shapes the releases, in plain types."""
        groups = [
            {name: _plain(value) for name, value in group.items() if name != "params"}
            for group in self.optimizer.param_groups
        ]
        return {
            "event": self._event.to_dict(),
            "dataset_size": self._scheme.dataset_size,
            "expected_batch_size": self._scheme.expected_size,
            "strategy": self._described_strategy(),
            "arithmetic": self._clipper.arithmetic.name,
            "noise": self._noise,
            "parameters": fingerprint.of_parameters(self._parameters),
            "optimizer": type(self.optimizer).__name__,
            "groups": groups,
            **({} if self._views is None else {"averaged_views": self._views.count}),
            **({} if self._penalty is None else {"penalty": getattr(self._penalty, "__qualname__", "given")}),
            **(
                {} if self._public_statistics is None else {"public_statistics": self._described_statistics()}
            ),
        }

    def _about(self) -> About:
        """What a statement of this run needs and its releases do not tell."""
        return About(
            strategy=self._strategy_to_tell(),
            public_statistics=self._described_statistics(),
            parts=self._parts,
            divisor=self._clipper.divisor,
            arithmetic=self._clipper.arithmetic.name,
            noise=self._noise,
            delta=self._delta,
            budget=None if self._budget is None else self._budget.epsilon,
            run=self._tag,
            planned=self._planned,
            noise_multiplier=self._multiplier,
            seeded=self._seeded,
            key=self._key.id,
            draws=self._hands.draws or None,
            probed=self._independence is not None,
            planned_tests=self._planned_tests(),
            followed_metric=self._hands.follows_metric,
            penalised=self._penalty is not None,
            versions=versions(),
        )

    def _planned_tests(self) -> tuple[str, ...]:
        if not self._tests:
            return ()
        return ("replacement", "collation") if self.loader.is_mixing_possible else ("replacement",)

    def _described_strategy(self) -> dict[str, Any]:
        """Its configuration, and what it has learned from releases."""
        return self._strategy.describe() | self._clipper.state_dict()

    def _strategy_to_tell(self) -> dict[str, Any]:
        """The same for the ledger: frozen entries and norms of weights follow from releases, and are long."""
        return {k: v for k, v in self._described_strategy().items() if k not in ("frozen", "weight_norms")}

    def _described_statistics(self) -> dict[str, Any] | None:
        return None if self._public_statistics is None else self._public_statistics.describe()

    def _data_digest(self) -> str:
        """Of the records, and of whose they are."""
        users = b"" if self._users is None else fingerprint.of_users(self._users.table())
        return (fingerprint.of_data(self._dataset) + users).hex()

    def _model_digest(self) -> str:
        return fingerprint.of_model(self._model).hex()

    def _ledger_name(self) -> str:
        return str(self._ledger.path) if isinstance(self._ledger, FileLedger) else "The ledger"


def _plain(value: Any) -> Any:
    """A setting of an optimizer in types that JSON and `weights_only=True` know."""
    value = plain(value)
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else repr(value)
