"""The pipeline of a private step, shared by eager and compiled steps.

    sample -> clip -> record -> noise -> update

    hand_out  sample: checks, then the batch that the loader has drawn
    backward  clip: from losses to the bounded sum of a piece; `gather` adds up the pieces of a batch
    release   record: the ledger entry is durable before any noise is drawn; noise; then `.grad` and learned values
    update    the optimizer steps on the released gradient

All state is in the `StepContext`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import ref

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from clipwise.clipping.contrib.sparse import without
from clipwise.engine.context import StepContext
from clipwise.engine.pieces import over_views
from clipwise.engine.record import charge_on_rank_0, describe_run
from clipwise.errors import StepError
from clipwise.gradients.outline import explain
from clipwise.ledger import crash_points
from clipwise.noise.mechanism import noised_sums, write_gradients
from clipwise.optim.averaging import add_penalty
from clipwise.sampling import generators
from clipwise.sampling.loader import Piece
from clipwise.validation import training_loop
from clipwise.validation.first_batches import recommend_check
from clipwise.validation.step_inputs import require_losses

P = ParamSpec("P")
T = TypeVar("T")


def reporting_failures(function: Callable[Concatenate[StepContext, P], T]) -> Callable[Concatenate[StepContext, P], T]:
    """Make a function report its errors to the other ranks, which would otherwise wait for this one."""

    @wraps(function)
    def reporting(context: StepContext, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(context, *args, **kwargs)
        except BaseException as error:
            context.ranks.fail(error)
            raise

    return reporting


# ------------------------------------------------------------------- sample


def secrets_ahead(context: StepContext) -> Iterator[tuple[bytes, bytes, int]]:
    """The sampling secrets of the coming steps. Called for every new iterator of the loader."""
    require_open(context)
    training_loop.require_same_ranks(context.ranks.count)
    return context.keys.ahead()


@reporting_failures
def hand_out(context: StepContext, batch: Any, piece: Piece) -> Any:
    """The rows that the loader yields for a piece, marked for the independence probe, with their random views."""
    require_open(context)
    if context.must_load:
        context.require_loaded()
    layout, is_first = context.layout, piece.index_in_batch == 0
    if layout.is_sharded:
        layout.require_piece(piece.size)
        if is_first:
            layout.reshard()
    context.guard.before_draw()
    weights, clipper = context.weights, context.clipper
    moves_weights = clipper.moves_weights or bool(clipper.adapts and clipper.frozen)
    weights.before_draw(moves_weights)
    follow_update(context)
    if moves_weights:
        weights.state.take()  # weights were clipped, or frozen entries restored
    if layout.is_sharded and is_first:
        context.ranks.exchange("draw", check=piece.check)
        layout.unshard()
    context.handed = None
    if any(test.is_pending for test in context.tests):
        context.handed = viewed(context, batch, piece)
        if context.plan.loss is not None:
            arrangements = partial(context.loader.fetcher.arrangements, piece.indices)
            context.tests[0].examine(context.handed, piece.size, context.which(piece), arrangements)
            context.guard.before_draw()  # the first pass may have made layers
    context.loop.draws_from_key = False
    context.guard.remember(batch)
    # Marked before the views are drawn, so that gradients at the inputs are per example.
    return viewed(context, batch if context.independence is None else context.independence.mark(batch), piece)


def require_open(context: StepContext) -> None:
    """Raise for a closed run, a forked copy of a run, and inside `private.ema.applied()`."""
    if context.weights.is_closed:
        raise StepError("This private run is closed: make a new one to continue.")
    if context.process != os.getpid():
        raise StepError(
            "This private run belongs to the process that this one was forked from. A step here would add the noise of "
            "a step there to another sum: make the private run in the process that trains."
        )
    require_own_weights(context)


def require_own_weights(context: StepContext) -> None:
    """Raise if the model currently holds the averages instead of its weights."""
    if context.plan.averages is not None and context.plan.averages.is_applied:
        raise StepError(
            "This is inside a block of private.ema.applied(), which restores the model's own weights at its end: an "
            "update would be lost, and a checkpoint would hold the averages instead of the weights. Train and save "
            "outside of it."
        )


def viewed(context: StepContext, batch: Any, piece: Piece) -> Any:
    """The views of a batch. A second draw for the same piece gives the same views."""
    if context.plan.views is None:
        return batch
    secret = context.keys.key.derive(f"views/{piece.number}")
    return context.plan.views.of_batch(batch, generators.generator_from(secret))


# --------------------------------------------------------------------- clip


def step(context: StepContext, losses: Tensor | None, outputs: Tensor | None) -> bool:
    """`backward`, then `update` after the last piece of a batch. Returns whether the optimizer stepped."""
    return update(context, backward(context, losses, outputs))


@reporting_failures
def backward(context: StepContext, losses: Tensor | None, outputs: Tensor | None) -> bool:
    """Compute the bounded sum of a piece from its losses; release after the last piece. Returns whether it released."""
    require_open(context)
    piece = context.loader.awaited()
    strategy, clipper, observer = context.strategy, context.clipper, context.observer
    if strategy.has_local_update:
        context.require_no_local_update("private.step")
    if losses is None:
        if piece.size:
            raise StepError(
                "losses is None, and the last batch of private.loader is not empty. Give one loss per example: only an "
                "empty batch needs none."
            )
        begin(context, piece)
        if observer is not None:
            observer.losses(context, piece, torch.zeros(0))
        return gather(context, piece, context.clipper.nothing())
    if context.ranks.is_first and not (context.tests or strategy.is_coupled or observer):
        recommend_check()
    if context.plan.views is not None:
        losses = over_views(context, losses, piece.size)
    losses = require_losses(losses, piece.size, strategy.is_coupled)
    begin(context, piece)
    if not context.is_described:
        training_loop.require_no_loss_scaling(losses)
    # Tensors that the graph saved may be marked; here they act as plain tensors.
    with torch._C.DisableTorchFunctionSubclass():
        try:
            if context.independence is not None and context.independence.examine(losses):
                context.is_described = False
            if observer is not None:
                losses = observer.losses(context, piece, losses)
            clipped = clipper.sum_at_outputs(losses, outputs) if clipper.needs_outputs else clipper.clipped_sum(losses)
        except RuntimeError as error:
            explain(error)
            raise
    return gather(context, piece, clipped)


@reporting_failures
def backward_local_update(context: StepContext, batch: Any) -> bool:
    """`backward` for a strategy with a local update, which computes the bounded sum from the batch."""
    require_open(context)
    piece = context.loader.awaited()
    if not context.strategy.has_local_update:
        raise StepError(
            "private.step_local_update is for a strategy with a local update, such as Batch(..., local_update=f): call "
            "private.step(losses)."
        )
    begin(context, piece)
    clipped = context.clipper.clipped_update(batch) if piece.size else context.clipper.nothing()
    context.guard.before_step()  # the local update must only change its copy of the model
    context.weights.released.require_own()
    return gather(context, piece, clipped)


def begin(context: StepContext, piece: Piece) -> None:
    """The checks before a piece of a batch is used."""
    context.guard.before_step()
    context.in_step = False  # an exhausted budget does not depend on the batch
    if context.plan.budget is not None:
        context.ledger.require_allowed(context.plan.budget, context.event, context.tag)
    context.in_step = True
    context.weights.before_step(piece.last)
    if context.loop.before_step(piece.index_in_batch == 0):
        context.is_described = False  # the next release puts it into the ledger
    if context.clipper.draws:
        context.clipper.secret = context.keys.key.derive(f"clipper/{piece.number}")


def gather(context: StepContext, piece: Piece, clipped: dict[str, Tensor]) -> bool:
    """Add the bounded sum of a piece; release after the last piece. Returns whether it released."""
    bounds = context.clipper.bounds
    if piece.index_in_batch == 0 or context.partial is None:
        total = clipped
    else:
        total, before = context.partial
        if bounds != before:
            context.partial = None
            context.loader.reset()
            raise StepError(
                "Weights or clipping constants were changed between two pieces of a batch, so one noise level does not "
                "fit both. Change them between batches: private.step returns True when a batch is complete."
            )
        for name, gathered in total.items():
            gathered += clipped.pop(name)  # frees its memory
    piece.consumed = True
    if not piece.last:
        context.partial = total, bounds
        context.in_step = False
        return False
    context.partial = None
    if context.layout.is_sharded:
        context.layout.reshard()
    with releasing(context):
        release(context, partial(_noise, context, total), partial(write_gradient, context), piece.check)
    return True


# ---------------------------------------------------------- record and noise


@contextmanager
def releasing(context: StepContext) -> Iterator[None]:
    """Wraps a release. If it fails after it was charged, it is unknown how much of it became visible."""
    made = context.ledger.made(context.tag)
    try:
        yield
    except BaseException:
        context.loader.reset()  # the iterator may be one step ahead of the key
        if context.made() != made:
            context.ledger.doubt(context.tag)
        raise
    finally:
        context.in_step = False


def release(
    context: StepContext,
    noise: Callable[[], dict[str, Tensor]],
    write: Callable[[dict[str, Tensor]], None],
    check: int | None = 0,
) -> None:
    """Charge the ledger, add noise, write the gradient. The secret of this step is overwritten.

    Args:
        noise: adds the noise of this step's key to the sums and divides. A compiled step only copies its keys to the
            device here, and returns the memory that `write` fills.
        check: a digest of the draw, which must be the same on all ranks; None if the step is already charged.
    """
    if check is not None:
        charge(context, check)
    context.is_followed = False
    released = noise()
    context.keys.advance()
    crash_points.reached("step.before-grad")
    write(released)
    context.weights.released.remember()
    context.weights.released.is_unused = True
    clipper, layout = context.clipper, context.layout
    clipper.parts = context.parts
    if clipper.adapts and clipper.learn(layout.whole_release(released) if layout.is_sharded else released):
        context.set_parts()
    if getattr(context.strategy, "running_statistics", None) is not None:
        context.weights.state.take()  # layers took their running statistics from the release


def charge(context: StepContext, check: int = 0) -> None:
    """Charge the ledger for a release before any of it is visible. On several ranks the others wait for rank 0."""
    if context.ranks.count > 1:
        charge_on_rank_0(context, check)
    else:
        charge_alone(context)


def charge_alone(context: StepContext) -> None:
    """`charge` without the other ranks."""
    if not context.is_described:
        describe_run(context)
    context.ledger.charge(context.event, context.tag, context.plan.budget)


def noised(context: StepContext, total: dict[str, Tensor]) -> dict[str, Tensor]:
    """(sum + noise) / divisor of each sum. The sums are overwritten. Every rank draws the same noise."""
    layout, divisor, key = context.layout, context.clipper.divisor, context.keys.key
    if layout.is_sharded:
        return layout.noised(total, context.parts, divisor, key)
    return noised_sums(total, context.parts, divisor, key, context.parameters)


def _noise(context: StepContext, total: dict[str, Tensor]) -> dict[str, Tensor]:
    layout = context.layout
    if layout.is_sharded or context.ranks.count > 1:
        total = layout.reduced(total)
    if context.observer is None:
        return noised(context, total)

    def noised_whole(sums: dict[str, Tensor]) -> dict[str, Tensor]:
        return dict(layout.whole_release(noised(context, dict(layout.own_part(sums)))))

    # An audit sees the sums with every entry, on each rank.
    return dict(layout.own_part(context.observer.released(context, dict(layout.whole_release(total)), noised_whole)))


def write_gradient(context: StepContext, released: Mapping[str, Tensor]) -> None:
    """Write the released values to `.grad`, with public corrections."""
    layout, gradients = context.layout, released
    if context.plan.public_statistics is not None:
        gradients = context.plan.public_statistics.correct(released, context.parameters)
    if context.clipper.adapts and context.clipper.frozen:
        gradients = without(gradients, context.clipper.frozen)
    if layout.is_sharded:
        layout.write(gradients if gradients is released else layout.own_part(gradients))
    else:
        write_gradients(context.parameters, gradients)
    if context.plan.penalty is not None:
        add_penalty(context.plan.penalty, context.model, context.parameters)


# ------------------------------------------------------------------- update


def update(context: StepContext, is_released: bool = True, step: Callable[[], object] | None = None) -> bool:
    """Update the weights with the released gradient, by `step` or else by the optimizer. Returns whether it did."""
    if not is_released:
        return False
    crash_points.reached("step.before-update")
    weights = context.weights
    weights.state.is_updating, weights.released.is_unused = True, False
    try:
        (step or context.optimizer.step)()
        weights.released.remember()
        follow_update(context, has_stepped=True)  # so that the model is ready for evaluation
    finally:
        weights.state.is_updating = False
        weights.state.take()
    return True


def follow_update(context: StepContext, has_stepped: bool = False) -> None:
    """Update what depends on the released weights: public statistics, bounds, noise, averages.

    `has_stepped` is whether an optimizer has just updated the weights with a released gradient. Only then the
    averages are updated. (Fused optimizers do not increase torch's version counters.)
    """
    clipper, statistics, averages = context.clipper, context.plan.public_statistics, context.plan.averages
    if clipper.adapts:
        clipper.settle()
    is_new = not context.is_followed
    is_updated = is_new or has_stepped
    context.is_followed |= has_stepped
    if statistics is not None:
        statistics.refresh(force=is_updated)
    if clipper.adapts:
        context.follow_weights(is_updated)
    if is_new and has_stepped and averages is not None:
        averages.update()
        context.weights.average_updates += 1


def watch_steps(context: StepContext) -> list[RemovableHandle]:
    """Watch the optimizer's steps. The hooks hold the run weakly: the optimizer may live longer."""
    watching, optimizer = ref(context), context.optimizer

    def before(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (found := watching()) is not None and not found.weights.state.is_updating:
            closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the first is the optimizer
            found.weights.before_user_step(closure is not None, warns=training_loop.is_newest(found))

    def after(*_: object) -> None:
        if (found := watching()) is None or found.weights.state.is_updating:
            return
        if found.weights.after_user_step():
            follow_update(found, has_stepped=True)
            found.weights.state.take()
        elif found.plan.public_statistics is not None:
            found.plan.public_statistics.refresh(force=True)

    return [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
