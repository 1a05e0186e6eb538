"""The public description of a run: for the ledger, for statements and for the fingerprint of its configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from clipwise.engine import fingerprint
from clipwise.ledger.run_description import About, versions
from clipwise.report import statement, wording
from clipwise.report.statement import Statement
from clipwise.validation.arguments import plain

if TYPE_CHECKING:
    from clipwise.engine.context import StepContext


def strategy(context: StepContext) -> dict[str, Any]:
    """The strategy's configuration and the values that it learned from releases."""
    return context.strategy.describe() | context.clipper.state_dict()


def public_strategy(context: StepContext) -> dict[str, Any]:
    """`strategy` for the ledger, without frozen entries and weight norms, which are long and follow from releases."""
    return {k: v for k, v in strategy(context).items() if k not in ("frozen", "weight_norms")}


def is_reproducible(context: StepContext) -> bool:
    """Whether any release in the ledger used a given seed for its noise and samples."""
    return context.is_seeded or any(entry.get("seeded") is True for entry in context.ledger.about)


def about(context: StepContext) -> About:
    """What a statement needs in addition to the releases."""
    plan, loop = context.plan, context.loop
    tests = ("replacement", "collation") if context.loader.fetcher.is_mixing_possible else ("replacement",)
    return About(
        strategy=public_strategy(context),
        public_statistics=_statistics(context),
        parts=context.parts,
        divisor=context.clipper.divisor,
        arithmetic=context.clipper.arithmetic.name,
        noise=plan.noise,
        delta=plan.delta,
        budget=None if plan.budget is None else plan.budget.epsilon,
        run=context.tag,
        planned=plan.planned,
        noise_multiplier=plan.multiplier,
        seeded=context.is_seeded,
        key=context.keys.key.id,
        draws=loop.draws or None,
        probed=context.independence is not None and context.independence.reaches_batch,
        planned_tests=tests if context.tests else (),
        followed_metric=loop.follows_metric,
        penalised=plan.penalty is not None,
        versions=versions(),
    )


def statement_of(context: StepContext) -> Statement:
    """The privacy statement of the run so far."""
    ledger = context.ledger
    ledger.require_in_place()
    changed = context.weights.verify(looks_inside=True)
    written = [About.from_dict(entry) for entry in ledger.about]
    own = about(context)
    if context.is_described:  # the last entry of this run describes this process, or rank 0
        last = [entry for entry in written if entry.run == context.tag][-1]
        written.remove(last)
        if not context.ranks.is_first:
            own = replace(own, draws=last.draws, followed_metric=last.followed_metric, versions=last.versions)
    weights = wording.CLOSED if context.weights.is_closed else wording.VERIFIED
    return statement.of_releases(
        ledger.history(),
        context.event,
        context.plan.delta,
        plan=ledger.plan,
        run=ledger.run,
        processes=(*written, own),
        dataset_size=context.scheme.dataset_size,
        exact=ledger.exact,
        declared=ledger.declared,
        weights=wording.CHANGED_SINCE if changed else weights,
    )


def summary(context: StepContext) -> list[tuple[str, str]]:
    """The settings of the run and its number of steps. Epsilon is left out: it needs verified weights."""
    plan, event = context.plan, context.event
    target = f"noise multiplier {event.noise_multiplier:.4g}"
    if plan.budget is not None:
        target = f"epsilon {plan.budget.epsilon:g} at delta {plan.delta:g}, {target}"
    steps = f"{context.ledger.position}" + (f" of {plan.planned}" if plan.planned is not None else "")
    found = [
        ("model", type(plan.model).__name__),
        ("clipping", type(context.strategy).__name__),
        ("privacy", f"{event.adjacency} of one {event.unit}, {event.sampling} sampling"),
        ("target", target),
        ("steps", steps),
        ("expected batch size", f"{context.scheme.expected_size:g} of {context.scheme.dataset_size}"),
    ]
    return [*found, ("guarantee", "none claimed: the run has a seed")] if is_reproducible(context) else found


def configuration(context: StepContext) -> dict[str, Any]:
    """All public settings that determine the releases, in plain types."""
    plan, optimizer = context.plan, context.optimizer
    groups = [
        {name: _plain(value) for name, value in group.items() if name != "params"} for group in optimizer.param_groups
    ]
    found = {
        "event": context.event.to_dict(),
        "dataset_size": context.scheme.dataset_size,
        "expected_batch_size": context.scheme.expected_size,
        "strategy": strategy(context),
        "arithmetic": context.clipper.arithmetic.name,
        "noise": plan.noise,
        "parameters": fingerprint.of_parameters(context.parameters),
        "optimizer": type(optimizer).__name__,
        "groups": groups,
    }
    if plan.views is not None:
        found["augmentation_multiplicity"] = plan.views.count
    if plan.penalty is not None:
        found["penalty"] = getattr(plan.penalty, "__qualname__", "given")
    if plan.public_statistics is not None:
        found["public_statistics"] = _statistics(context)
    return found


def _statistics(context: StepContext) -> dict[str, Any] | None:
    statistics = context.plan.public_statistics
    return None if statistics is None else statistics.describe()


def _plain(value: Any) -> Any:
    """An optimizer setting in types that JSON and `weights_only=True` support."""
    value = plain(value)
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else repr(value)
