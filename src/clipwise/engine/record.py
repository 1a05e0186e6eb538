"""The description of a run in its ledger, and the charge of a release on several ranks."""

from __future__ import annotations

from typing import Any

from clipwise.distributed import followers
from clipwise.distributed.ranks import digest_of
from clipwise.engine import describe
from clipwise.engine.context import StepContext
from clipwise.ledger import multi_run


def describe_run(context: StepContext) -> None:
    """Describe the run in the ledger, before a release that has no description yet."""
    if context.keys.is_new:
        multi_run.require_unused(context.keys.key.id, context.ledger)
    context.ledger.describe(describe.about(context).to_dict())
    _note_described(context)


def charge_on_rank_0(context: StepContext, check: int) -> None:
    """Charge the ledger on rank 0; every other rank waits until the charge is durable.

    `check` is a digest of the draw, which must be the same on all ranks.
    """
    ranks, ledger, loop = context.ranks, context.ledger, context.loop
    note: Any = None
    if ranks.is_first:
        before = len(ledger.about)
        if not context.is_described:
            describe_run(context)
        ledger.charge(context.event, context.tag, context.plan.budget)
        note = [dict(entry) for entry in ledger.about[before:]]
    elif not context.is_described:
        note = [loop.draws, loop.follows_metric]
    notes = followers.exchanged(ranks, note, digest_of(check, context.parts))
    if ranks.is_first:
        for found in filter(None, notes[1:]):
            if loop.merge(*found):
                context.is_described = False
        return
    for entry in notes[0] or ():
        ledger.describe(entry)
    _note_described(context)
    ledger.charge(context.event, context.tag)  # rank 0 has compared it with the budget


def _note_described(context: StepContext) -> None:
    context.is_described, context.described_strategy = True, describe.public_strategy(context)
    context.keys.is_new = False
