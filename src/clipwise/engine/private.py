"""Private: a private training run, as the user sees it.

    sample -> clip -> record -> noise -> update

The order of a step is in step.py, its state in context.py, and `make_private`, in make_private.py, makes a run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, cast

from torch import Tensor

from clipwise import accounting
from clipwise.engine import describe, resume
from clipwise.engine import step as pipeline
from clipwise.engine.compiled import CompiledStep
from clipwise.engine.context import StepContext
from clipwise.engine.observer import ObservedScheme
from clipwise.engine.plan import Plan
from clipwise.errors import ConfigurationError, StepError
from clipwise.ledger import multi_run
from clipwise.noise import generators
from clipwise.optim.averaging import AveragedParameters
from clipwise.privacy import Part, Spent
from clipwise.report.statement import Statement
from clipwise.sampling import Fetcher, PrivateLoader, Scheme
from clipwise.validation import training_loop
from clipwise.validation.arguments import number, one_of
from clipwise.validation.first_batches import Loss


class Private:
    """A private training run. Made by `make_private`; see there.

    Attributes:
        loader: hands out the batches of an epoch, one item per step. A batch may be empty, and counts all the same:
            `step(None)` takes its step without a forward pass.
        optimizer: the user's own, unchanged.
    """

    def __init__(self, plan: Plan) -> None:
        self.optimizer = plan.optimizer
        self._context = context = StepContext(plan)
        self._spent_cache: dict[tuple[int, float, str], float] = {}
        watch = context.observer
        self.loader = context.loader = PrivateLoader(
            plan.scheme
            if watch is None
            else cast(Scheme, ObservedScheme(plan.scheme, partial(watch.kept, context))),
            Fetcher(plan.dataset, plan.collate_fn),
            context.secrets_ahead,
            cut=plan.cut,
            prepare=partial(pipeline.hand_out, context),
            **plan.loader_options,
        )
        if watch is not None:
            context.keys.key, context.is_seeded = watch.begins(context), True  # an audit gives the key
        context.loop.is_reproducible = context.is_seeded

    # ----------------------------------------------------------------- the step

    def step(self, losses: Tensor | None, outputs: Tensor | None = None) -> bool:
        """`backward(losses)`, then `optimizer.step()` when the batch is complete.

        Returns whether the optimizer stepped: False after a piece of a batch that is not its last.
        """
        return pipeline.update(self._context, pipeline.backward(self._context, losses, outputs))

    def step_sets(self, batch: Any) -> bool:
        """The step of a strategy with a `local_update`, which is called on the batch; then as `step`.

        Args:
            batch: the mini-set that `loader` handed out last, perhaps moved to another device.

        Returns:
            Whether the optimizer stepped: False after a mini-set that is not the last of its batch.
        """
        return pipeline.update(self._context, pipeline.backward_sets(self._context, batch))

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
        is_complete = pipeline.backward(self._context, losses, outputs)
        if is_complete:
            self._context.weights.released.remember(keeps_sample=True)
        return is_complete

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
        context = self._context
        context.require_open()
        if not self.loader.is_awaiting:
            raise StepError(
                "private.randomness() draws from the key of one step: use it inside of the loop over private.loader, "
                "around the forward pass of each batch."
            )
        secret = context.keys.key.derive(f"randomness/{self.loader.awaited().index_in_batch}")
        with generators.drawing_from(secret, {p.device for p in context.parameters.values()}):
            context.loop.draws_from_key = True
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
        self._context.require_no_local_update("private.compiled")
        loss = self._context.plan.loss if loss is None else loss
        if loss is None:
            raise ConfigurationError(
                "private.compiled needs a loss: give it here, or as make_private(..., loss=...)."
            )
        return CompiledStep(self._context, loss, size)

    # ------------------------------------------------------------- what it cost

    def spent(self, delta: float | None = None, accountant: str | None = None) -> Spent:
        """What all releases so far have cost, of all runs that share the ledger.

        Args:
            delta: by default that of the run.
            accountant: "pld", the tight one, or "rdp", a looser bound that is cheap enough for every step. By default
                "pld", and "renyi-filter" if other runs have charged the ledger as well: it holds for runs that were
                configured after releases of others were seen, the others only if all runs were fixed beforehand.
        """
        context, ledger = self._context, self._context.ledger
        ledger.require_in_place()
        context.weights.verify()
        if delta is None:
            delta = context.plan.delta
        else:
            delta = number("delta", delta, above=0, below=1)
        history = ledger.history()
        steps = sum(entry.count for entry in history)
        accountant = multi_run.accountant_of(history) if accountant is None else accountant
        key = (steps, delta, accountant)
        if key not in self._spent_cache:
            self._spent_cache = {key: multi_run.epsilon_of(history, delta, accountant, ledger.plan)}
        return Spent(
            epsilon=self._spent_cache[key],
            delta=delta,
            adjacency=context.event.adjacency,
            unit=context.event.unit,
            sampling=context.event.sampling,
            steps=steps,
            accountant=accountant,
            reproducible=describe.is_reproducible(context),
            assumption=multi_run.assumption_of(history, accountant),
        )

    def parts(self) -> list[Part]:
        """What the next release holds: names, sensitivity of the *sum*, noise on each coordinate."""
        return self._context.current_parts()

    @property
    def steps(self) -> int:
        """How many releases the ledger counts so far, those of other runs that share it included."""
        return self._context.ledger.position

    @property
    def noise_multiplier(self) -> float:
        """z: the noise's standard deviation over the sensitivity, for all parts together."""
        return self._context.event.noise_multiplier

    @property
    def views(self) -> int:
        """How many rows the loader hands out for each example."""
        return self._context.views

    @property
    def averaged(self) -> AveragedParameters:
        """The average of the released parameters: `with private.averaged.applied(): evaluate(model)`."""
        averages = self._context.plan.averages
        if averages is None:
            raise ConfigurationError("This run keeps no averages: give make_private(..., averaged=0.999).")
        if not averages.is_applied:
            self._context.follow_update()
        return averages

    def on_limit(self) -> dict[str, bool]:
        """Whether each parameter's weights sit on their max_weight_norm; nothing if the strategy clips no weights.

        It follows from released weights and costs no privacy. A layer that sits there might do better with a larger
        limit.
        """
        return self._context.clipper.on_limit()

    @property
    def divisor(self) -> float:
        """The public constant that the noised sum is divided by: the expected number of clipped vectors."""
        return self._context.clipper.divisor

    def tradeoff(self) -> accounting.Tradeoff:
        """What all releases so far leave to an attacker: the trade-off between false alarms and misses.

        If other runs have charged the ledger as well, it holds if all of them were fixed before the first release.
        """
        self._context.weights.verify()
        return accounting.tradeoff_of(self._context.ledger.history())

    def statement(self) -> Statement:
        """The privacy statement of the run so far; `clipwise statement` makes the same of a ledger file.

        Raises:
            StepError: if the model's parameters and buffers are not what the last release, or `make_private`, left.
        """
        return describe.statement_of(self._context)

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
        context = self._context
        context.require_open()
        context.require_loaded()
        context.ledger.declare(context.tag, kind, " ".join(reason.split()))
        context.weights.accept()

    # ------------------------------------------------- stopping and going on

    def state_dict(self) -> dict[str, Any]:
        """Optimizer, accountant, configuration and position, in types that `weights_only=True` loads.

        It holds no secret and may be published. Save the model's own `state_dict()` beside it.
        """
        return resume.state_dict(self._context)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint.

        After a clean end (`close`) at the checkpoint's position, with the same configuration, data, model and
        resume file, the run goes on bit for bit as if it had never stopped. Otherwise a fresh secret is
        taken, and steps that are made again are charged again. Load the model's own state before.
        """
        resume.load_state_dict(self._context, state)

    def close(self) -> None:
        """End the run cleanly: settle the ledger and, if there is a resume file, keep the next secrets there.

        While an exception is handled, a batch that was drawn and not released stays counted as a step: what it holds
        may be why there was one.

        Raises:
            StepError: if the model's parameters and buffers are not what the last release, or `make_private`, left. The
                run is closed all the same.
        """
        resume.close(self._context, sys.exc_info()[1])

    def __enter__(self) -> Private:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            resume.close(self._context, error)
        except StepError:
            if (
                error is None
            ):  # else that one is raised; the ledger records that the weights were not verified
                raise

    __reduce_ex__ = StepContext.__reduce_ex__
