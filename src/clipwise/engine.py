"""Private: the five stages of a private step around a model and an optimizer.

    sample -> bound -> noise -> record -> update

The engine wires and orders; it holds no mathematics. What belongs to one step lives in that step. `make_private`, in
make.py, makes one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from clipwise import accounting, checkpoint, checks, faults, fingerprint, guards, statement, watch
from clipwise.about import About, versions
from clipwise.augment import Views
from clipwise.averaged import AveragedParameters
from clipwise.budget import Budget
from clipwise.clipping import Batch, BatchClipper, Clipper, Strategy
from clipwise.clipping.sparse import without
from clipwise.compiled import CompiledStep
from clipwise.errors import (
    BudgetExhausted,
    CheckpointError,
    ConfigurationError,
    LedgerError,
    PrivacyWarning,
    StepError,
)
from clipwise.given import plain
from clipwise.gradients import opaque
from clipwise.layers.all_public_statistics import AllPublicStatistics
from clipwise.ledger import FileLedger, Ledger
from clipwise.noise import NoiseKey
from clipwise.noising import noised_sums
from clipwise.parts import parts_of
from clipwise.penalty import Penalty, add_penalty
from clipwise.privacy import (
    Event,
    Part,
    Sampling,
    Spent,
)
from clipwise.release import in_order_of, laid_as, memory_order
from clipwise.sampling import (
    ByUser,
    Cut,
    Fetcher,
    Piece,
    PrivateLoader,
    Scheme,
)
from clipwise.statement import Statement
from clipwise.validation.first_batches import Loss, ReplacementTest, recommend_check
from clipwise.watch import watched


class Private:
    """A private training run. Made by `make_private`; see there.

    Attributes:
        loader: hands out the batches of an epoch. A batch may be empty, and counts all the same.
        optimizer: the user's own, unchanged.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        parameters: dict[str, nn.Parameter],
        dataset: Any,
        scheme: Scheme,
        strategy: Strategy,
        clipper: Clipper,
        parts: tuple[Part, ...],
        event: Event,
        noise: str,
        budget: Budget | None,
        delta: float,
        ledger: Ledger,
        resume_file: Path | None,
        seed: int | None,
        cut: Cut | None,
        public_statistics: AllPublicStatistics | None,
        views: Views | None,
        averages: AveragedParameters | None,
        penalty: Penalty | None,
        loader_options: Mapping[str, Any],
        collate_fn: Callable[[list[Any]], Any] | None,
        probe: bool,
        loss: Loss | None = None,
    ) -> None:
        self.optimizer = optimizer
        self._model, self._parameters, self._dataset = model, parameters, dataset
        self._scheme, self._strategy, self._clipper = scheme, strategy, clipper
        self._users = cut if isinstance(cut, ByUser) else None
        self._parts, self._event, self._noise = parts, event, noise
        self._public_statistics, self._views = public_statistics, views
        self._averages, self._penalty = averages, penalty
        self._budget, self._delta = budget, delta
        self._ledger, self._resume_file = ledger, resume_file
        self._seeded = seed is not None
        # A run that released nothing has nothing to go on with.
        self._must_load = isinstance(ledger, FileLedger) and ledger.existing and ledger.position > 0
        if ledger.position and not self._must_load:
            ledger.restart()  # the key of this run is not that of the releases before it
            if budget is not None:
                budget.recompute(ledger.history(), event, goes_on=False)
        self._key = NoiseKey.fresh() if seed is None or self._must_load else self._key_from(seed)
        self._watch = watch.current()  # an audit that looks on
        self._epoch_secret, self._slot = b"", 0
        self._followed = ledger.position  # releases whose update was taken in by what follows the weights
        self._partial: dict[str, Tensor] | None = None  # what was gathered of a batch, under these bounds:
        self._partial_bounds = self._clipper.bounds
        self._written: dict[str, tuple[Tensor, int]] = {}
        self._remember_written()  # what an earlier run left in .grad: nobody uses it
        self._named = {name for name, _ in model.named_parameters()}
        self._buffers = checks.BufferGuard(model)
        self._hands = guards.Watch(model, optimizer)
        guards.require_alone(self, parameters)
        self._independence = checks.IndependenceProbe() if probe else None
        self._loss, self._tests = loss, list[ReplacementTest]()
        self._handed: Any = None  # the last batch, while compiled steps test it
        if loss is not None and not strategy.is_coupled:
            self._plan_test(loss)
        self._spent_cache: dict[tuple[int, float, str], float] = {}
        self._described = False
        self._told_strategy: dict[str, Any] = {}
        self._closed = False
        self._stepped = None if public_statistics is None else _told_of_steps(optimizer, self)
        self.loader = PrivateLoader(
            scheme if self._watch is None else watched(scheme, partial(self._watch.kept, self)),
            Fetcher(dataset, collate_fn),
            self._secrets_ahead,
            cut=cut,
            prepare=self._hand_out,
            **loader_options,
        )
        if self._watch is not None:
            self._key, self._seeded = self._watch.begins(self), True  # it has a key of its own

    # ----------------------------------------------------------------- the step

    def step(self, losses: Tensor, outputs: Tensor | None = None) -> bool:
        """`backward(losses)`, then `optimizer.step()` when the batch is complete.

        Returns whether the optimizer stepped: False after a piece of a batch that is not its last.
        """
        return self._updated(self.backward(losses, outputs))

    def step_sets(self, batch: Any) -> bool:
        """The step of a strategy with a `local_update`, which is called on the batch; then as `step`.

        Args:
            batch: the mini-set that `loader` handed out last, perhaps moved to another device.

        Returns:
            Whether the optimizer stepped: False after a mini-set that is not the last of its batch.
        """
        piece = self._require_open().awaited()
        if not self._is_local():
            raise StepError(
                "private.step_sets is for a strategy with a local update, such as Batch(..., local_update=f): call "
                "private.step(losses)."
            )
        assert isinstance(self._clipper, BatchClipper)
        self._begin(piece)
        clipped = self._clipper.clipped_update(batch) if piece.size else self._clipper.nothing()
        self._require_untouched()  # the update has a copy to work on
        return self._updated(self._gather(piece, clipped))

    def backward(self, losses: Tensor, outputs: Tensor | None = None) -> bool:
        """Write the private gradient of the batch to `.grad` of every trainable parameter.

        Args:
            losses: one loss for each example of the batch that `loader` handed out last, of its own outputs and
                targets alone: what a loss takes from the targets of others, such as their mean, nobody sees. A strategy
                that clips whole mini-sets takes their mean, or a single number.
            outputs: what the model returned, of which the losses were computed. `Lipschitz` needs it; others do not
                look at it.

        Returns:
            Whether the batch is complete and `.grad` written. With `max_physical_batch_size` or mini-sets a
            batch comes in pieces, whose sums are gathered until the last.

        Raises:
            BudgetExhausted: if the release would pass the budget; nothing is released then.
        """
        piece = self._require_open().awaited()
        self._require_no_local_update("private.step")
        if not (self._tests or self._strategy.is_coupled or self._watch):
            recommend_check()
        losses = self._over_views(losses, piece.size)
        losses = checks.require_losses(losses, piece.size, self._strategy.is_coupled)
        self._begin(piece)
        with opaque.explained():
            if self._independence is not None:
                self._independence.examine(losses)
            if self._watch is not None:
                losses = self._watch.losses(self, piece, losses)
            clipped = self._clipper.sum_at_outputs(losses, outputs)
        return self._gather(piece, clipped)

    def _begin(self, piece: Piece) -> None:
        """Before anything is computed from a piece of a batch."""
        self._require_untouched()
        self._require_budget()
        if piece.index_in_batch == 0:
            self._hands.at_batch()
        if self._hands.before_step():
            self._described = False  # the next release says so in the ledger
        for p in self._parameters.values():
            p.grad = None  # what is there was released and used before: its memory is needed
        self._written.clear()
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
            return False
        total, self._partial = self._partial, None
        try:
            self._release(total)
        except BaseException:
            self.loader.reset()  # the iterator is a step ahead of the key: going on with it would mix them up
            raise
        return True

    def _updated(self, is_released: bool) -> bool:
        """Let the optimizer step on what was released."""
        if is_released:
            faults.reached("step.before-update")
            self.optimizer.step()
            self._remember_written()
            self._follow_update()  # so that the model can be evaluated as it is
            self._hands.after_update()
        return is_released

    def _follow_update(self, has_stepped: bool = False) -> None:
        """Bring up to date what follows the released weights, once an optimizer has moved them, or anybody else.

        Args:
            has_stepped: whether the optimizer says so itself. Fused ones leave no trace that torch counts.
        """
        self._clipper.settle()
        is_new = self._followed != self._ledger.position
        is_updated = is_new or has_stepped
        self._followed = self._ledger.position
        if self._public_statistics is not None:
            self._public_statistics.refresh(force=is_updated)
        self._follow_weights(is_updated)
        if is_new and self._averages is not None:
            self._averages.update()

    def _follow_weights(self, is_updated: bool) -> None:
        """Let bounds and noise follow weights and clips."""
        if self._clipper.follow(is_updated):
            self._parts = self._next_parts()
            if self._averages is not None and self._clipper.moved:
                self._averages.scale(self._clipper.moved)
            if self._told_strategy != self._strategy_to_tell():
                self._described = False  # constants were set anew: the next release says so in the ledger

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
        faults.reached("step.before-grad")
        gradients: Mapping[str, Tensor] = noised_sums
        if self._public_statistics is not None:
            gradients = self._public_statistics.correct(noised_sums, self._parameters)
        if self._clipper.frozen:
            gradients = without(gradients, self._clipper.frozen)
        for name, p in self._parameters.items():
            p.grad = laid_as(p, gradients[name])
        if self._penalty is not None:
            add_penalty(self._penalty, self._model, self._parameters)
        self._remember_written()
        self._hands.released()
        self._learn(noised_sums)

    def _learn(self, means: Mapping[str, Tensor]) -> None:
        """Let the strategy adapt to what was released, and the noise to the strategy."""
        self._clipper.parts = self._parts
        if self._clipper.learn(means):
            self._parts = self._next_parts()

    def _charge(self) -> None:
        """Count a release, before any of it is visible; with the first one, say what kind of run it is of."""
        if not self._described:
            self._ledger.describe(self._about().to_dict())
            self._described, self._told_strategy = True, self._strategy_to_tell()
        if self._budget is not None:
            self._budget.left -= 1  # first: an interrupt in between may only make the budget smaller
        self._ledger.charge(self._event)

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

    def spent(self, delta: float | None = None, accountant: str = "pld") -> Spent:
        """What all releases so far have cost.

        Args:
            delta: by default that of the run.
            accountant: "pld", the tight one, or "rdp", a looser bound that is cheap enough for every step.
        """
        delta = (
            self._delta if delta is None else accounting.arguments.number("delta", delta, above=0, below=1)
        )
        key = (self._ledger.position, delta, accountant)
        if key not in self._spent_cache:
            self._spent_cache = {key: accounting.epsilon_of(self._ledger.history(), delta, accountant)}
        return Spent(
            epsilon=self._spent_cache[key],
            delta=delta,
            adjacency=self._event.adjacency,
            unit=self._event.unit,
            sampling=self._event.sampling,
            steps=self._ledger.position,
            accountant=accountant,
        )

    def parts(self) -> list[Part]:
        """What the next release holds: names, sensitivity of the *sum*, noise on each coordinate."""
        # What a batch was drawn for stays; and to look must not change weights.
        if not (self._closed or self.loader.is_awaiting or self._clipper.moves_weights):
            self._follow_weights(is_updated=False)
        return list(self._parts)

    @property
    def steps(self) -> int:
        """How many releases are counted so far."""
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
        """What all releases so far leave to an attacker: the trade-off between false alarms and misses."""
        return accounting.tradeoff_of(self._ledger.history())

    def statement(self) -> Statement:
        """The privacy statement of the run so far; `clipwise statement` makes the same of a ledger file."""
        told = [About.from_dict(about) for about in self._ledger.about]
        before = told[:-1] if self._described else told  # the last one is of this sitting
        return statement.of_releases(
            self._ledger.history(),
            self._event,
            self._delta,
            run=self._ledger.run,
            sittings=(*before, self._about()),
            dataset_size=self._scheme.dataset_size,
        )

    # ------------------------------------------------- stopping and going on

    def state_dict(self) -> dict[str, Any]:
        """Optimizer, accountant, configuration and position, in types that `weights_only=True` loads.

        It holds no secret and may be published. Save the model's own `state_dict()` beside it.
        """
        self._require_own_weights()
        # First, for it follows the weights, and what is told below with it.
        averaged = {} if self._averages is None else {"averaged": self.averaged.state_dict()}
        state = {
            "format": checkpoint.FORMAT,
            "run": self._ledger.run,
            "position": self._ledger.position,
            "slot": self._slot,
            "configuration": self._configuration(),
            "fingerprint": self._fingerprint(),
            "seeded": self._seeded,
            "history": [{"event": e.event.to_dict(), "count": e.count} for e in self._ledger.history()],
            "optimizer": self.optimizer.state_dict(),
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
        # First, because what is loaded here is a part of the configuration. Another strategy begins anew.
        strategy, mine = state["configuration"].get("strategy", {}), self._strategy.describe()
        if mine.items() <= strategy.items() and self._clipper.load_state_dict(strategy):
            self._parts = self._next_parts()
        self.optimizer.load_state_dict(dict(state["optimizer"]))
        if self._averages is not None and "averaged" in state:
            self._averages.load_state_dict(state["averaged"])
        if is_new:
            self._ledger.import_history(history)
        self._slot, self._seeded = int(state["slot"]), self._seeded or bool(state["seeded"])
        now = self._fingerprint()
        secrets = checkpoint.take_secrets(self._resume_file) if self._resume_file else None
        goes_on = (
            secrets is not None
            and self._ledger.position == state["position"]
            and now == state["fingerprint"]
            and secrets.matches(
                state["run"], state["position"], now, self._data_digest(), self._model_digest()
            )
        )
        if secrets is not None and goes_on:
            self._key = NoiseKey.from_secret_bytes(bytes.fromhex(secrets.key))
            self._epoch_secret = bytes.fromhex(secrets.epoch)
        else:
            self._key = NoiseKey.fresh()
            self._ledger.restart()
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
        if self._budget is not None:
            # In the middle of an epoch the last entry is that of this key; imported ones are closed.
            in_epoch = goes_on and not is_new and self._slot > 0
            self._budget.recompute(self._ledger.history(), self._event, goes_on=in_epoch)
        self._must_load, self._partial = False, None
        self._followed = self._ledger.position
        self._follow_weights(is_updated=False)  # those that were loaded before
        self._hands.forget()
        if self._public_statistics is not None:
            self._public_statistics.refresh(force=True)  # the model's own state was loaded before
        self.loader.reset()

    def close(self) -> None:
        """End the run cleanly: settle the ledger and, if there is a resume file, keep the next secrets there."""
        if self._closed:
            return
        self._closed = True
        if self._stepped is not None:
            self._stepped.remove()
        try:
            begun = not self._must_load and self._ledger.position > 0
            # (A forked copy has nothing to leave behind: the run and its secrets are the other process's.)
            if self._resume_file is not None and begun and not self._key.is_forked:
                checkpoint.write_secrets(self._resume_file, self._secrets())
        finally:
            self._ledger.close()
            self._key.wipe()
            self._epoch_secret = b""
            self.loader.reset()

    def __enter__(self) -> Private:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Neither copy nor pickle: two runs with one key would put the same noise on two sums."""
        raise StepError(
            "A private run cannot be copied or pickled: it holds the secret of its noise, and a copy would put that "
            "noise on other sums. To go on elsewhere, save private.state_dict(), call private.close() and load it into "
            "a new run; to send a model, send model.state_dict()."
        )

    # ------------------------------------------------------------------ inside

    def _key_from(self, seed: int) -> NoiseKey:
        """The same seed under another configuration, model or data set must give other noise."""
        model, data = bytes.fromhex(self._model_digest()), bytes.fromhex(self._data_digest())
        views = b"" if self._views is None else self._views.fingerprint()
        return NoiseKey.from_seed(seed, self._fingerprint().encode() + model + data + views)

    def _secrets(self) -> checkpoint.Secrets:
        """What going on from here takes."""
        return checkpoint.Secrets(
            run=self._ledger.run,
            position=self._ledger.position,
            fingerprint=self._fingerprint(),
            data=self._data_digest(),
            model=self._model_digest(),
            key=self._key.secret_bytes().hex(),
            epoch=self._epoch_secret.hex(),
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
        self._hands.at_draw()
        self._follow_update()  # for whoever steps the optimizer on their own
        if self._is_local() and (learned := self._buffers.changed_statistics()):
            warnings.warn(
                f"Running statistics of {', '.join(map(repr, learned))} were changed since the last batch was drawn. "
                "If a forward pass of the model learned them from private data, they leave with it without any noise: "
                "call model.eval() before such a pass, and set them from public data before the model is used.",
                PrivacyWarning,
                stacklevel=2,
            )
        if self._independence is not None:
            batch = self._independence.mark(batch)
        if self._views is not None:
            batch = self._views.of_batch(batch)
        if self._loss is not None and self._tests:
            self._tests[0].examine(
                batch, piece.size, self._which(piece), partial(self.loader.arrangements, piece)
            )
        self._handed = batch if any(test.is_pending for test in self._tests) else None
        self._buffers.remember()
        return batch

    def _which(self, piece: Piece) -> tuple[int, int]:
        """Tells a piece from the others of this run; one that is drawn again is the same."""
        return self._ledger.position, piece.index_in_batch

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
        if not self._is_local():  # a copy may learn what it likes; the model itself is watched below
            for name, module in inventory.statistics:
                checks.require_no_statistics_in(name, module, self._strategy.is_coupled)
        self._buffers.compare_listed()
        guards.require_no_hooks(self._parameters)
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
            if name in self._parameters and (grad := p.grad) is not None:
                written = self._written.get(name)
                foreign = written is None or grad is not written[0] or grad._version != written[1]
                if foreign and bool(grad.any()):  # zero_grad(set_to_none=False) leaves zeros
                    raise StepError(
                        f"Parameter {name!r} has a gradient that private.backward did not write. If somebody called "
                        "backward() on the losses, leave that out: it is not private. If you changed .grad "
                        "after private.backward, or another private run trains this model too, call "
                        "optimizer.zero_grad() after the update."
                    )

    def _is_local(self) -> bool:
        return isinstance(self._strategy, Batch) and self._strategy.local_update is not None

    def _require_no_local_update(self, called: str) -> None:
        if self._is_local():
            raise StepError(
                f"{called} has no use for losses with Batch(..., local_update=f), which computes its own: call "
                "private.step_sets(batch) with the batch that private.loader handed out."
            )

    def _remember_written(self) -> None:
        self._written = {
            name: (grad, grad._version)
            for name, p in self._parameters.items()
            if (grad := p.grad) is not None
        }

    def _require_budget(self) -> None:
        if self._budget is not None and self._budget.is_exhausted(self._ledger.history, self._event):
            raise BudgetExhausted(
                f"One more step would pass epsilon={self._budget.epsilon:g} at delta={self._budget.delta:g} "
                f"after {self._ledger.position} steps. Nothing was released for it."
            )

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
            **({"memory_order": order} if (order := memory_order(self._parameters.values())) else {}),
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
            seeded=self._seeded,
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


def _told_of_steps(optimizer: torch.optim.Optimizer, private: Private) -> RemovableHandle:
    """Let a run follow each update, also where the loop steps the optimizer itself and evaluates right after.

    The optimizer does not hold the run: it may be copied, pickled and live longer.
    """
    run = ref(private)

    def follow(*_: object) -> None:
        followed = run()
        if followed is not None:
            followed._follow_update(has_stepped=True)

    return optimizer.register_step_post_hook(follow)


def _plain(value: Any) -> Any:
    """A setting of an optimizer in types that JSON and `weights_only=True` know."""
    value = plain(value)
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else repr(value)
