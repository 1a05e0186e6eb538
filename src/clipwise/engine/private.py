"""Private: the public interface of a private training run.

    sample -> clip -> record -> noise -> update

step.py holds the pipeline of a step, context.py its state, and make_private.py the function that makes a run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from html import escape
from types import TracebackType
from typing import Any

from torch import Tensor

from clipwise import accounting
from clipwise.deprecation import renamed_attributes
from clipwise.engine import describe, resume
from clipwise.engine import step as pipeline
from clipwise.engine.compiled import CompiledStep
from clipwise.engine.context import StepContext
from clipwise.engine.plan import Plan
from clipwise.errors import ConfigurationError, StepError
from clipwise.ledger import multi_run
from clipwise.optim.averaging import AveragedParameters
from clipwise.privacy import Part, Spent
from clipwise.report.statement import Statement
from clipwise.sampling import generators
from clipwise.sampling.fetch import Fetcher
from clipwise.sampling.loader import PrivateLoader
from clipwise.validation import training_loop
from clipwise.validation.arguments import number, one_of
from clipwise.validation.first_batches import Loss


@renamed_attributes(averaged="ema", step_sets="step_local_update")
class Private:
    """A private training run, made by `make_private`.

    Attributes:
        loader: yields the batches of an epoch, one item per step. A batch may be empty and still counts as a step:
            `step(None)` takes that step without a forward pass.
        optimizer: the user's optimizer, unchanged.
    """

    def __init__(self, plan: Plan) -> None:
        self.optimizer = plan.optimizer
        self._context = context = StepContext(plan)
        self._spent_cache: dict[tuple[int, float, str], float] = {}
        watch = context.observer
        self.loader = context.loader = PrivateLoader(
            plan.scheme,
            Fetcher(plan.dataset, plan.collate_fn),
            partial(pipeline.secrets_ahead, context),
            cut=plan.cut,
            prepare=partial(pipeline.hand_out, context),
            rank=context.layout.share[0],
            ranks=context.layout.share[1],
            kept=None if watch is None else partial(watch.kept, context),
            **plan.loader_options,
        )
        context.step_hooks = pipeline.watch_steps(context)
        if watch is not None:
            context.keys.key, context.is_seeded = context.key_of_rank_0(watch.begins(context)), True
        context.loop.is_reproducible = context.is_seeded

    # ----------------------------------------------------------------- the step

    def step(self, losses: Tensor | None, outputs: Tensor | None = None) -> bool:
        """Take a private step: `backward(losses)` and, when the batch is complete, `optimizer.step()`.

        Args:
            losses: one loss for each example of the last batch of `loader`, or None for an empty batch; see `backward`.
            outputs: the model's outputs; only `Lipschitz` needs them.

        Returns:
            Whether the optimizer stepped: False after a piece that is not the last of its batch.
        """
        return pipeline.step(self._context, losses, outputs)

    def step_local_update(self, batch: Any) -> bool:
        """`step` for a strategy with a `local_update`, which is called on the batch.

        Args:
            batch: the last microbatch of `loader`, possibly moved to another device.

        Returns:
            Whether the optimizer stepped: False after a microbatch that is not the last of its batch.
        """
        return pipeline.update(self._context, pipeline.backward_local_update(self._context, batch))

    def backward(self, losses: Tensor | None, outputs: Tensor | None = None) -> bool:
        """Write the private gradient of the batch to `.grad` of every trainable parameter.

        Args:
            losses: one loss for each example of the last batch of `loader`. Each must depend on the outputs and
                targets of its own example only. No check finds a loss that uses the targets of other examples, such as
                their mean. A strategy that clips whole microbatches takes the mean of the losses, or a single number.
                None for an empty batch or piece, which then needs no forward pass: many models cannot run on zero rows.
            outputs: the model's outputs that the losses were computed from. Only `Lipschitz` needs them.

        Returns:
            Whether the batch is complete and `.grad` is written. With `max_physical_batch_size` or microbatches a
            batch comes in pieces, whose sums are added up until the last piece.

        Raises:
            BudgetExhausted: if the release would exceed the budget. Nothing is released.
        """
        is_complete = pipeline.backward(self._context, losses, outputs)
        if is_complete:
            self._context.weights.released.remember(keeps_sample=True)
        return is_complete

    @contextmanager
    def randomness(self) -> Iterator[None]:
        """A context in which random layers, such as dropout, draw from the run's secret key.

            for x, y in private.loader:
                with private.randomness():
                    losses = F.cross_entropy(model(x), y, reduction="none")
                private.step(losses)

        Torch's global generators, of the CPU and of the parameters' CUDA devices, are set from the key of the step,
        independently of `torch.manual_seed`, and are restored afterwards. A second block for the same batch draws the
        same random numbers.
        """
        context = self._context
        pipeline.require_open(context)
        if not self.loader.is_awaiting:
            raise StepError(
                "private.randomness() draws from the key of one step: use it inside the loop over private.loader, "
                "around the forward pass of each batch."
            )
        secret = context.keys.key.derive(f"randomness/{self.loader.awaited().number}")
        with generators.drawing_from(secret, {p.device for p in context.parameters.values()}):
            context.loop.draws_from_key = True
            yield

    def compiled(self, loss: Loss | None = None, size: int | None = None, backend: str = "auto") -> CompiledStep:
        """A step that is compiled once and replayed: `step(*batch)` in place of `step(loss(*batch))`.

        A batch that is a mapping is one argument: `step(batch)` in place of `step(loss(batch))`.

        On a CPU, forward, backward and clipping are traced into one graph, which Inductor compiles. On CUDA the
        operations of a step are captured in CUDA graphs, with noise and update; `backend="inductor"` compiles them
        first. What cannot be traced is captured as it is, and what cannot be captured takes eager steps; a warning
        gives the reason. The result is the same up to rounding.

        Args:
            loss: a function from a batch of `loader`, `loss(*batch)`, to one loss per example. It must do the same at
                every step: a compiled step does not run its Python code again. By default the loss given to
                `make_private`. The replacement test runs it on the first batches.
            size: the number of examples of a compiled step. A larger batch is cut into pieces; a smaller one is padded
                with rows of weight 0. By default the batch size where it is constant, else the expected batch size
                plus 3 standard deviations. Microbatches of `Batch` are never cut.
            backend: "auto": capture on CUDA; on a CPU, compile once eager steps have taken a minute, and keep what is
                faster. "inductor": compile at once, on a CPU or on CUDA, where it is not measured yet. "cudagraphs":
                capture eager operations in CUDA graphs, without Inductor. "aot_eager": trace, and run the traced
                operations one by one (for debugging). "eager": compile nothing.
        """
        self._context.require_no_local_update("private.compiled")
        loss = self._context.plan.loss if loss is None else loss
        if loss is None:
            raise ConfigurationError("private.compiled needs a loss: give it here, or as make_private(..., loss=...).")
        return CompiledStep(self._context, loss, size, backend)

    # ------------------------------------------------------------ privacy spent

    def spent(self, delta: float | None = None, accountant: str | None = None) -> Spent:
        """The privacy spent by all releases so far, of all runs that share the ledger.

        Args:
            delta: by default the delta of the run.
            accountant: "pld", which is tight, or "rdp", a looser bound that is cheap enough for every step. By default
                "pld", or "renyi-filter" if other runs have charged the ledger as well. The filter also holds if a run
                was configured after releases of other runs were seen; "pld" and "rdp" assume that all runs were
                configured before the first release.
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

    @property
    def budget(self) -> float | None:
        """The epsilon that the run was given as its budget; None if it was given a noise multiplier."""
        budget = self._context.plan.budget
        return None if budget is None else budget.epsilon

    def parts(self) -> list[Part]:
        """The parts of the next release: names, sensitivity of the *sum*, noise on each coordinate."""
        return self._context.current_parts()

    @property
    def steps(self) -> int:
        """The number of releases in the ledger, including those of other runs that share it."""
        return self._context.ledger.position

    @property
    def noise_multiplier(self) -> float:
        """z: the noise's standard deviation over the sensitivity, for all parts together."""
        return self._context.event.noise_multiplier

    @property
    def views(self) -> int:
        """The number of rows that the loader yields for each example."""
        return self._context.views

    @property
    def ema(self) -> AveragedParameters:
        """The average of the released parameters: `with private.ema.applied(): evaluate(model)`."""
        averages = self._context.plan.averages
        if averages is None:
            raise ConfigurationError("This run keeps no averages: give make_private(..., ema=0.999).")
        if not averages.is_applied:
            self._context.layout.reshard()
            pipeline.follow_update(self._context)
        return averages

    def on_limit(self) -> dict[str, bool]:
        """Whether the norm of each parameter is at its max_weight_norm; empty if the strategy clips no weights.

        It follows from released weights and costs no privacy. A layer at its limit may train better with a larger one.
        """
        return self._context.clipper.on_limit()

    @property
    def divisor(self) -> float:
        """The public constant that the noised sum is divided by: the expected number of clipped vectors."""
        return self._context.clipper.divisor

    def tradeoff(self) -> accounting.Tradeoff:
        """The f-DP trade-off function of all releases so far: least false negative rate over false positive rate.

        If other runs have charged the ledger as well, it assumes that all were configured before the first release.
        """
        self._context.weights.verify()
        return accounting.tradeoff_of(self._context.ledger.history())

    def statement(self) -> Statement:
        """The privacy statement of the run so far. `clipwise statement` prints the same from a ledger file.

        Raises:
            StepError: if parameters or buffers were changed other than by a release since `make_private`.
        """
        return describe.statement_of(self._context)

    def declare_update(self, kind: str, reason: str) -> None:
        """Declare a change of the weights that no release of this run made. The run then continues from them.

        Nothing is verified. The ledger keeps the declaration, and every statement prints it as the user's assertion.

        Args:
            kind: "public": computed from public data alone, such as statistics of normalization layers that were set
                from public batches; "post-processing": from released values alone, such as averaged or pruned weights.
            reason: a short text: what was changed, and from what data. It is public.
        """
        one_of("kind", kind, training_loop.DECLARED)
        if not isinstance(reason, str) or not reason.strip():
            raise ConfigurationError("reason must be a text that describes what was changed, and from what.")
        context = self._context
        pipeline.require_open(context)
        context.require_loaded()
        context.ledger.declare(context.tag, kind, " ".join(reason.split()))
        context.weights.accept()

    # --------------------------------------------------- checkpoint and resume

    def state_dict(self) -> dict[str, Any]:
        """Optimizer, accountant, configuration and position, in types that `weights_only=True` loads.

        It holds no secret and may be published. Save the model's own `state_dict()` beside it.
        """
        return resume.state_dict(self._context)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a checkpoint. Load the model's own state first.

        After a clean end (`close`) at the checkpoint's position, with the same configuration, data, model and
        resume file, the run continues bit for bit as if it had never stopped. Otherwise it takes a fresh secret, and
        steps that are repeated are charged again.
        """
        resume.load_state_dict(self._context, state)

    def close(self) -> None:
        """End the run cleanly: settle the ledger and write the next secrets to the resume file, if there is one.

        While an exception is handled, a batch that was drawn and not released counts as a step: its data may have
        caused the exception.

        Raises:
            StepError: if parameters or buffers were changed other than by a release since `make_private`. The run is
                closed nevertheless.
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
            if error is None:  # else `error` is raised; the ledger records the failed verification
                raise

    def __repr__(self) -> str:
        """The run in one line, without a verification of the weights."""
        return f"Private({', '.join(f'{name}: {value}' for name, value in describe.summary(self._context))})"

    def _repr_html_(self) -> str:
        """A table for notebooks."""
        rows = "".join(
            f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>"
            for name, value in describe.summary(self._context)
        )
        return f"<table>{rows}</table>"

    __reduce_ex__ = StepContext.__reduce_ex__
