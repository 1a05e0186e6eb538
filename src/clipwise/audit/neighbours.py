"""The grey-box check: two neighbouring runs, the second replaying what the first released."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from clipwise.audit import mechanism
from clipwise.audit.comparing import allowed, compare, compare_ends, movement
from clipwise.audit.findings import Finding, NeighboursReport
from clipwise.audit.records import CHANGES, Change, with_record
from clipwise.audit.tape import Recorder, Release, state_of
from clipwise.engine import resume
from clipwise.engine.observer import observing
from clipwise.errors import AuditError, ConfigurationError
from clipwise.privacy import Adjacency, Unit

if TYPE_CHECKING:
    from clipwise.engine.context import StepContext

MakeRun = Callable[[Any], Any]


def neighbours(
    make_run: MakeRun,
    dataset: Any,
    *,
    records: Sequence[int] | None = None,
    changes: Mapping[str, Change] = CHANGES,
    seed: int = 0,
) -> NeighboursReport:
    """Check on neighbouring data sets that a run releases what it declares, and nothing else.

    Two runs are made that differ in one unit. The second gets the released values of the first, so that both stand at
    the same parameters at every step. Then, step by step,

        each part of the sum moves by at most its declared sensitivity,
        all parts together move by at most 1 / z standard deviations of their noise, z that of the charged event,
        events, parts, number of steps, parameters and buffers are identical,
        what is added to the sum is the same for the same key, and has the declared standard deviation,

    and, of the run as a whole, no noise serves twice, no secret is in what `state_dict()` returns, and draws that are
    charged as Poisson do not look like epochs. It is cheap and, for a given seed, deterministic. It tests and does not
    prove: what no record tried here brings to light is not found.

    The neighbour follows the adjacency of the run: under zero-out the unit is left out of every draw, under
    replace-one the next record stands in its place.

    Args:
        make_run: trains on the data set that it is given, from `make_private` to the last step. It must do the same
            each time: torch's generator is seeded before each step. Several random layers, such as dropout, draw
            otherwise where a batch has one example less, which looks like a leak: switch them off.
        dataset: records of any kind, best synthetic or public ones. 20 to 100 are enough.
        records: whose units are left out or replaced, one after the other. By default the last: it is the last row of
            its batches, so that random numbers that are drawn row by row stay those of the other rows.
        changes: what an adversary does to the record in both data sets before it is left out or replaced in one.
        seed: of the keys and of torch's generator.

    Returns:
        A report: `report.require()` raises an `AuditError` that says what is not as declared.
    """
    report = NeighboursReport()
    releases: list[Release] = []
    for index in (len(dataset) - 1,) if records is None else records:
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(dataset):
            raise ConfigurationError(f"records: {index!r} is no index of the data set.")
        for change in changes.values():
            # Other keys for each pair: the more noise is seen, the more its size tells.
            releases += _pair(report, make_run, dataset, index, change, seed + report.pairs)
    report.findings += mechanism.of_noise(releases)
    return report


def _pair(
    report: NeighboursReport, make_run: MakeRun, dataset: Any, index: int, change: Change, seed: int
) -> list[Release]:
    """One data set and its neighbour. Returns what was released for the first."""
    changed = with_record(dataset, index, change(dataset[index]))
    first = Recorder(seed)
    _run(make_run, changed, first)
    run = first.runs[0]
    if run.event.adjacency is Adjacency.REPLACE_ONE:
        if run.event.unit is Unit.USER:
            raise ConfigurationError("neighbours: runs that protect users are checked under zero-out only.")
        second = Recorder(seed, tape=first.releases)
        other = with_record(changed, index, dataset[(index + 1) % len(dataset)])
    else:
        second, other = Recorder(seed, missing=(_unit_of(run, index),), tape=first.releases), changed
    _run(make_run, other, second)
    found = [*compare(first.releases, second.releases)]
    if not found:
        found += compare_ends(state_of(run.model), state_of(second.runs[0].model))
    if report.pairs == 0:
        found += _of_run(first)
        report.history = tuple(run.ledger.history())
    report.findings += [f for f in found if f not in report.findings]
    report.pairs += 1
    for one, other_release in zip(first.releases, second.releases, strict=False):
        moved = movement(one, other_release) if one.sums.keys() == other_release.sums.keys() else 0.0
        report.steps += 1
        report.moved += moved > 0
        report.worst = max(report.worst, moved / allowed(one))
    return first.releases


def _unit_of(run: StepContext, index: int) -> int:
    """Who has this record: what is left out is all of a unit."""
    if run.users is None:
        return index
    return next(unit for unit, records in enumerate(run.users.table()) if index in records)


def _of_run(first: Recorder) -> list[Finding]:
    """What one run tells by itself."""
    run = first.runs[0]
    size = run.scheme.dataset_size
    is_of_records = run.event.unit is Unit.RECORD
    return [
        *mechanism.of_streams(first.releases),
        *(mechanism.of_draws(first.releases, size) if is_of_records else ()),
        *mechanism.of_secrets(resume.state_dict(run), first.key(0), len(first.releases)),
    ]


def _run(make_run: MakeRun, dataset: Any, recorder: Recorder) -> None:
    with torch.random.fork_rng(devices=[]), observing(recorder):
        torch.manual_seed(recorder.seed)
        make_run(dataset)
    if not recorder.runs:
        raise AuditError(
            "make_run made no private run: it must call clipwise.make_private on the data set it is given."
        )
    if len(recorder.runs) > 1:
        raise AuditError("make_run made several private runs: check one at a time.")
