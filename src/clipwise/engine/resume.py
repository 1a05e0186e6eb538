"""Save, resume and close a run: its checkpoint and its secrets. The file formats are in checkpoint.py."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from clipwise.deprecation import current_names, current_strategy
from clipwise.engine import checkpoint, describe, fingerprint
from clipwise.engine.context import StepContext
from clipwise.engine.step import charge_alone, follow_update, reporting_failures, require_open, require_own_weights
from clipwise.errors import BudgetExhausted, CheckpointError, LedgerError, StepError, warn
from clipwise.noise.key import NoiseKey
from clipwise.privacy import Sampling
from clipwise.validation.arguments import plain


def state_dict(context: StepContext) -> dict[str, Any]:
    """Optimizer, accountant, configuration and position, in plain types. It holds no secret."""
    ledger, weights, averages = context.ledger, context.weights, context.plan.averages
    require_own_weights(context)
    context.layout.reshard()
    if weights.verify(looks_inside=True):
        raise StepError(
            "The model was changed after the private run was closed: its weights would not be "
            "those of this run. Save private.state_dict() before you change the model."
        )
    if averages is not None:
        follow_update(context)
    state: dict[str, Any] = {
        "format": checkpoint.FORMAT,
        "run": ledger.run,
        "tag": context.tag,
        "position": ledger.position,
        "made": context.made(),
        "slot": context.keys.slot,
        "configuration": describe.configuration(context),
        "fingerprint": fingerprint.of_configuration(describe.configuration(context)),
        "seeded": describe.is_reproducible(context),
        "history": [{"event": e.event.to_dict(), "count": e.count, "run": e.run} for e in ledger.history()],
        "exact": ledger.exact,
        "plan": None if ledger.plan is None else dict(ledger.plan),
        "optimizer": context.optimizer.state_dict(),
        "weights": _checksums(context),
        "declared": [list(update) for update in ledger.declared],
    }
    if averages is not None:
        state["ema"] = averages.state_dict()
    found: dict[str, Any] = plain(state)  # a learning rate may be numpy's
    return found


@reporting_failures
def load_state_dict(context: StepContext, state: Mapping[str, Any]) -> None:
    """Continue from a checkpoint: with its own secrets if nothing has changed since, else with fresh ones."""
    ledger, averages, keys = context.ledger, context.plan.averages, context.keys
    require_open(context)
    context.layout.reshard()
    history = checkpoint.history_of(state)
    state = current_names(state)
    is_new = ledger.run != state["run"]  # then the history is imported
    _require_fitting(context, state, is_new)
    # First, because the loaded values are part of the configuration. Another strategy starts with its own.
    strategy, mine = current_strategy(state["configuration"].get("strategy", {})), context.strategy.describe()
    if mine.items() <= strategy.items() and context.clipper.load_state_dict(strategy):
        context.set_parts()
    context.optimizer.load_state_dict(dict(state["optimizer"]))
    if averages is not None and "ema" in state:
        averages.load_state_dict(state["ema"])
        context.weights.average_updates = averages.updates
    if is_new:
        ledger.import_history(history, exact=state.get("exact") is True, plan=state.get("plan"))
        for kind, reason in state["declared"]:
            ledger.declare(context.tag, kind, reason)
    made = _take_tag(context, state)
    keys.slot, context.is_seeded = int(state["slot"]), context.is_seeded or bool(state["seeded"])
    secrets = _secrets_of_rank_0(context)
    continues = False
    if secrets is not None and context.made() == made:
        expected = _secrets(context, state["run"])
        continues = expected.fingerprint == state["fingerprint"] and secrets.is_of_same_run(expected)
    continues = context.ranks.from_rank_0(lambda: continues, "state")
    if secrets is not None and continues:
        keys.key = NoiseKey(bytes.fromhex(secrets.key), secrets.key_id)
        keys.epoch = bytes.fromhex(secrets.epoch)
    else:
        keys.key = context.key_of_rank_0(NoiseKey.fresh())
        ledger.restart(context.tag)
        if context.scheme.sampling is Sampling.SHUFFLED:
            keys.slot = 0
        again = ledger.position - int(state["position"])
        warn(
            "The run continues with a fresh secret: it was not stopped cleanly at this checkpoint, or its "
            "configuration, model, data or resume file has changed (load the model's state before this one)."
            + (f" {again} releases after the checkpoint stay counted." if again else "")
        )
    context.is_described, keys.is_new = False, is_new or not continues
    context.must_load, context.partial, context.in_step = False, None, False
    context.is_followed = True
    context.follow_weights(is_updated=False)
    if context.plan.public_statistics is not None:
        context.plan.public_statistics.refresh(force=True)
    context.weights.accept()
    context.loader.reset()


def close(context: StepContext, error: BaseException | None) -> None:
    """End the run cleanly: settle the ledger and write the next secrets to the resume file, if there is one."""
    weights, key, ranks = context.weights, context.keys.key, context.ranks
    if weights.is_closed:
        return
    context.layout.reshard()
    weights.close()
    if error is not None:
        ranks.fail(error)
    for hook in context.step_hooks:
        hook.remove()
    try:
        _count_broken_step(context, error)
        is_begun = not context.must_load and context.made() > 0
        # A forked copy writes nothing: the run and its secrets belong to the other process.
        if is_begun and not key.is_forked:
            _close_together(context)
    finally:
        ranks.end()
        key.wipe()
        context.keys.epoch = b""
        context.loader.reset()
        is_verified = None if context.must_load else weights.unverified is None
        context.ledger.leave(context.tag, context, is_verified)
    if weights.unverified is not None:
        raise StepError(weights.unverified)


def _count_broken_step(context: StepContext, error: BaseException | None) -> None:
    """Charge a batch that was drawn and not released, if an error occurred that its data may have caused."""
    piece = context.loader.current
    is_open = error is not None and piece is not None and not (piece.consumed and piece.last)
    has_failed = context.in_step or context.loader.is_fetching or is_open
    is_foreign = context.must_load or context.keys.key.is_forked or not context.ranks.is_first
    if not has_failed or is_foreign or isinstance(error, BudgetExhausted):
        return
    # Nothing is released, so an exhausted budget is no error. A ledger that has failed counts its whole block.
    with suppress(BudgetExhausted, LedgerError):
        charge_alone(context)
    context.ledger.doubt(context.tag)


def _close_together(context: StepContext) -> None:
    """Write the secrets of the next step on rank 0, with the digest of a model that may be divided among the ranks."""
    ranks, file = context.ranks, context.plan.resume_file
    if ranks.is_broken:
        return  # other ranks may have used the noise of this step: the run continues with a fresh secret
    ranks.exchange("close")
    if context.layout.is_sharded or file is not None:
        secrets = _secrets(context, context.ledger.run)
        if file is not None:
            checkpoint.write_secrets(file, secrets)


def _secrets_of_rank_0(context: StepContext) -> checkpoint.Secrets | None:
    """The contents of the resume file, which rank 0 reads and deletes."""
    file = context.plan.resume_file
    return context.ranks.from_rank_0(lambda: checkpoint.take_secrets(file) if file else None, "state")


def _checksums(context: StepContext) -> dict[str, int]:
    """Checksums of the whole model. If it is sharded, all ranks take part."""
    own = context.weights.state.save()
    if not context.layout.is_sharded:
        return own
    return context.weights.state.checksums_of(context.layout.whole_state())


def data_digest(context: StepContext) -> str:
    """A digest of the records and of their assignment to users. It is secret."""
    users = b"" if context.users is None else fingerprint.of_users(context.users.table())
    return (fingerprint.of_data(context.plan.dataset) + users).hex()


def _secrets(context: StepContext, run: str) -> checkpoint.Secrets:
    """The secrets that are needed to continue from here."""
    return checkpoint.Secrets(
        run=run,
        position=context.made(),
        fingerprint=fingerprint.of_configuration(describe.configuration(context)),
        data=data_digest(context),
        model=fingerprint.of_model(context.model, context.layout.whole_state()).hex(),
        key=context.keys.key.secret_bytes().hex(),
        epoch=context.keys.epoch.hex(),
        key_id=context.keys.key.id,
    )


def _require_fitting(context: StepContext, state: Mapping[str, Any], is_new: bool) -> None:
    """Raise for a checkpoint of another model or optimizer, and for the ledger of another run."""
    mine = describe.configuration(context)
    for name in ("parameters", "optimizer"):
        if state["configuration"].get(name) != mine[name]:
            raise CheckpointError(
                f"The checkpoint's run has another {name} than this one: build the same model and optimizer, or begin "
                "a new run."
            )
    if is_new and context.ledger.position > 0:
        raise LedgerError(
            "The ledger belongs to another run than the checkpoint: give make_private the ledger that the "
            "checkpoint's run wrote."
        )
    if not is_new and context.ledger.position < state["position"]:
        raise LedgerError(
            "The ledger holds fewer releases than the checkpoint, so a part of it is missing: give make_private the "
            "complete ledger."
        )
    whole = context.layout.whole_state() if context.layout.is_sharded else None
    if differing := context.weights.state.differing(state["weights"], whole):
        raise CheckpointError(
            f"The model does not hold the weights of the checkpoint: {differing[0]!r} differs. Load the model's own "
            "state before this one: model.load_state_dict(...), then private.load_state_dict(...)."
        )


def _take_tag(context: StepContext, state: Mapping[str, Any]) -> int:
    """Take over the tag of the run in the checkpoint, and return the number of its releases there.

    A run with other events than before keeps its own tag, and so does one if the tag is in use (the run in the
    checkpoint is still open).
    """
    ledger = context.ledger
    older = state["run"] if ledger.run != state["run"] else ledger.untagged
    tag = str(state.get("tag", older))
    mine = [entry for entry in ledger.history() if entry.run == tag and not entry.event.purpose]
    is_same = all(entry.event == context.event for entry in mine)
    if tag != context.tag and is_same and ledger.enter(tag, context):
        ledger.leave(context.tag, context)
        context.tag, context.is_described = tag, False
    return int(state.get("made", state["position"]))
