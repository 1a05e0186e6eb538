"""The options that describe a run, the run that they resolve to or ledgers, and a table of the cost by every
accountant.

Errors of the library name arguments (`batch_size=3`). Here they are rewritten to name the options.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from clipwise import accounting
from clipwise.accounting.from_arguments import MOST_STEPS
from clipwise.cli.output import counted, rounded_up, say
from clipwise.engine.plan import adjacency_of, delta_of, planned_steps
from clipwise.errors import ConfigurationError, UnsupportedEventError
from clipwise.ledger import Snapshot, multi_run
from clipwise.privacy import Adjacency, Entry, Event, Sampling, Unit
from clipwise.report.wording import NO_GUARANTEE
from clipwise.sampling.base import Scheme
from clipwise.sampling.schemes import make_scheme
from clipwise.validation.arguments import number

Ledgers = Annotated[
    list[Path] | None, typer.Option("--ledger", help="Read this ledger instead of planning a run; may be repeated.")
]
SecondOpinion = Annotated[bool, typer.Option("--second-opinion", help="Also the figure of the library dp-accounting.")]


@dataclass(frozen=True)
class RunOptions:
    """The options of a planned run. None means that the option was left out."""

    noise_multiplier: Annotated[
        float | None, typer.Option(help="Standard deviation of the noise over the sensitivity of the clipped sum.")
    ] = None
    sample_rate: Annotated[float | None, typer.Option(help="The probability that a record is in a batch.")] = None
    batch_size: Annotated[int | None, typer.Option(help="The expected batch size; needs --dataset-size.")] = None
    dataset_size: Annotated[int | None, typer.Option(help="The number of records, which is public.")] = None
    steps: Annotated[int | None, typer.Option(help="The number of batches to train on.")] = None
    epochs: Annotated[float | None, typer.Option(help="Instead of --steps: the number of passes over the data.")] = None
    delta: Annotated[float, typer.Option(help="The delta, well below 1 / number of records.")] = 1e-5
    sampling: Annotated[
        Sampling,
        typer.Option(
            help="How batches are drawn. An ordinary shuffled loader is 'shuffled'. 'partition' is for Batch, which "
            "clips each block as a whole: for any other clipping the figure would be too low."
        ),
    ] = Sampling.POISSON
    adjacency: Annotated[Adjacency | None, typer.Option(help="The neighbours; by default those of the scheme.")] = None
    unit: Annotated[Unit, typer.Option(help="The unit of privacy: what one item stands for.")] = Unit.RECORD
    max_batch_size: Annotated[
        int | None, typer.Option(help="For truncated-poisson: the largest batch; by default it costs nothing.")
    ] = None
    microbatches: Annotated[int | None, typer.Option(help="For partition and fixed-size: microbatches per batch.")] = (
        None
    )

    @property
    def is_empty(self) -> bool:
        """Whether every option except delta was left out."""
        return replace(self, delta=RunOptions.delta) == RunOptions()

    @property
    def has_rate(self) -> bool:
        """Whether the batch size or the rate is given."""
        return self.sampling is Sampling.FULL or self.sample_rate is not None or self.batch_size is not None

    @property
    def has_length(self) -> bool:
        """Whether the length of the run is given."""
        return self.steps is not None or self.epochs is not None


@dataclass(frozen=True)
class ResolvedRun:
    """A resolved run without its noise."""

    scheme: Scheme
    adjacency: Adjacency
    unit: Unit
    steps: int

    def history(self, noise_multiplier: float) -> list[Entry]:
        """The releases of the run with this noise multiplier."""
        return [Entry(self.event(noise_multiplier), self.steps)]

    def event(self, noise_multiplier: float) -> Event:
        """One step of the run."""
        return self.scheme.event(noise_multiplier, self.adjacency, self.unit)

    def __str__(self) -> str:
        return (
            f"{self.steps} steps, {self.scheme.sampling} sampling at rate {self.scheme.sample_rate:.6g}, "
            f"{self.adjacency}"
            + ("" if self.unit is Unit.RECORD else f" of one {self.unit}")
            + (", each block clipped as a whole (Batch)" if self.scheme.sampling is Sampling.PARTITION else "")
        )


def plan_of(options: RunOptions, steps: int | None = None) -> ResolvedRun:
    """Resolve the options by the rules of `make_private`, or refuse them. `steps` is for options without a length."""
    if options.dataset_size is None and options.batch_size is not None:
        raise ConfigurationError(
            "--batch-size needs --dataset-size, because the cost depends on the rate between the two."
        )
    if options.dataset_size is None and options.sampling is Sampling.TRUNCATED_POISSON:
        raise ConfigurationError(
            "--sampling truncated-poisson needs --dataset-size, because it decides how often a batch is truncated."
        )
    if not options.has_rate:
        raise ConfigurationError("Give --sample-rate, or --batch-size and --dataset-size.")
    if not options.has_length and steps is None:
        raise ConfigurationError("Give --steps or --epochs: every step costs privacy.")
    if options.steps is not None and options.epochs is not None:
        raise ConfigurationError("Give --epochs or --steps, not both.")
    extras: dict[str, Any] = {"max_batch_size": options.max_batch_size}
    if options.microbatches is not None:
        extras["microbatches"] = options.microbatches
    # A rate is enough for the cost; the number of records does not matter then.
    size = 1 if options.dataset_size is None else options.dataset_size
    with naming_options():
        scheme = make_scheme(options.sampling, size, options.batch_size, options.sample_rate, **extras)
        if options.dataset_size is not None:  # warns if delta is too large for this many records
            delta_of(options.delta, None, options.dataset_size)
        planned = _length(options, scheme, steps)
    return ResolvedRun(scheme, adjacency_of(options.adjacency, scheme.sampling), options.unit, planned)


def _length(options: RunOptions, scheme: Scheme, steps: int | None) -> int:
    with suppress(OverflowError):  # 1 / rate and epochs / rate
        _ = scheme.steps_per_epoch
        planned = planned_steps(options.epochs, options.steps, scheme) if options.has_length else steps
        if planned is not None and planned <= MOST_STEPS:
            return planned
    raise ConfigurationError(f"The run would have more than {MOST_STEPS:g} steps: give fewer epochs or a larger rate.")


# _NAMES are never English words. _WORDS may be, so they count as arguments only next to a value.
_NAMES = "sample_rate|max_batch_size|batch_size|dataset_size|noise_multiplier"
_WORDS = "microbatches|sampling|adjacency|unit|steps|epochs|delta|epsilon"
_WITH_VALUE = re.compile(rf"\b({_NAMES}|{_WORDS})=('[^']*'|[^\s:,;]*[^\s:,;.])")
_ALONE = re.compile(rf"\b(?<!--)({_NAMES})\b|^({_WORDS})(?= must )")


def in_options(message: str) -> str:
    """The message with `--batch-size` for batch_size and `--sampling full` for sampling='full'."""
    message = _WITH_VALUE.sub(lambda found: f"{_option(found[1])} {found[2].strip(chr(39))}", message)
    return _ALONE.sub(lambda found: _option(found[0]), message)


@contextmanager
def naming_options() -> Iterator[None]:
    """Errors raised by the library in this block name options."""
    try:
        yield
    except ConfigurationError as error:
        raise ConfigurationError(in_options(str(error))) from error


def _option(argument: str) -> str:
    return "--" + argument.replace("_", "-")


# Accountants besides PLD: name, heading, remark on the bound, and the remark if there is no bound.
OTHERS = (
    ("rdp", "RDP", "looser, shown while training", "no bound for this kind of step"),
    ("zcdp", "zCDP", "looser", "no bound: batches are sampled"),
    ("gdp", "GDP", "exact: nothing is sampled", "no bound: batches are sampled"),
)
SECOND = ("dp-accounting", "dp-accounting", "PLD of that library: a second opinion", "no bound: fixed-size batches")


COUNTS = "report this one"
MOST_LINES = 12  # a run that was interrupted often has many entries, since a new key begins a new one


@dataclass(frozen=True)
class Releases:
    """Releases of one or several runs, and a heading for them."""

    history: list[Entry]
    heading: str
    runs: tuple[Snapshot, ...] = ()

    @property
    def event(self) -> Event:
        """One of the events. All have the same adjacency and unit, or the accountants refuse them."""
        return self.history[0].event

    @property
    def is_seeded(self) -> bool:
        """Whether any run had a given seed, so that it claims no guarantee."""
        return any(about.get("seeded") is True for run in self.runs for about in run.about)

    @property
    def is_shared(self) -> bool:
        """Whether these are releases of several runs."""
        return multi_run.is_shared(self.history)

    @property
    def plan(self) -> Mapping[str, Any] | None:
        """The plan in the first ledger."""
        return self.runs[0].plan if self.runs else None

    @property
    def assumption(self) -> str:
        """The assumption of all figures other than the Renyi filter; "" for a single run."""
        return multi_run.assumption_of(self.history, "pld")

    def explain_runs(self) -> None:
        """Print which figure holds for which runs, if there are several."""
        if not self.is_shared:
            return
        order = multi_run.order_of(self.history, self.plan)
        named = ", with ledgers given in the order in which the runs began" if len(self.runs) > 1 else ""
        say(
            f"The Renyi filter (order {order:g}, from the first plan{named}) also holds for runs that were "
            f"configured after releases of others were seen. All other figures hold {self.assumption}."
        )

    def describe(self) -> None:
        """Print the contents of the ledgers, then the heading."""
        for run in self.runs:
            if len(self.runs) > 1:
                say(f"{run.path}: {run.position} releases of run {run.run}")
            _print_kinds(run.history)
            if run.torn:
                say(
                    "The last line of the ledger is incomplete, after a crash or damage. The most it can stand for is "
                    "counted."
                )
            elif not run.clean:
                say("The run is in progress or did not end cleanly. All that it may have released is counted.")
        if self.is_seeded:
            say(f"Guarantee: {NO_GUARANTEE}. All figures are those of the same runs with fresh keys.")
        say(self.heading)


def releases_of(ledgers: Sequence[Path] | None, options: RunOptions) -> Releases:
    """The releases in the ledgers, or of the planned run if there are none."""
    number("--delta", options.delta, above=0, below=1)
    if ledgers:
        if not options.is_empty:
            raise ConfigurationError("--ledger already describes the run: combine it only with --delta.")
        found = multi_run.read_files(ledgers)
        history = multi_run.joint_history(found)
        count = len({entry.run for entry in history})
        what = f"{count} runs together" if count > 1 else f"run {found[0].run}"
        return Releases(history, f"{sum(e.count for e in history)} releases of {what}", tuple(found))
    if options.noise_multiplier is None:
        raise ConfigurationError("Describe a run with --noise-multiplier and the other options, or give --ledger.")
    plan = plan_of(options)
    with naming_options():
        history = plan.history(options.noise_multiplier)
    return Releases(history, f"{plan}, noise multiplier {options.noise_multiplier:g}")


def _print_kinds(history: Sequence[Entry]) -> None:
    counts: Counter[Event] = Counter()
    for entry in history:
        counts[entry.event] += entry.count
    for e, count in list(counts.items())[:MOST_LINES]:
        say(
            f"{counted(count, 'release')}: {e.sampling} sampling at rate {e.sample_rate:.6g}, "
            f"{e.adjacency} of one {e.unit}, noise multiplier {e.noise_multiplier:g}"
        )
    if len(counts) > MOST_LINES:
        say(f"and {len(counts) - MOST_LINES} more kinds of release")


def table_of(
    history: Sequence[Entry], delta: float, second_opinion: bool = False, plan: Mapping[str, Any] | None = None
) -> Table:
    """A table of the epsilon of every accountant at `delta`, and of the central limit, which is no bound.

    For several runs the Renyi filter is the figure to report. Its order follows from the `plan` of the first.
    """
    table = Table("accountant", f"epsilon at delta {delta:g}", "")
    is_shared = multi_run.is_shared(history)
    if is_shared:
        spent = multi_run.epsilon_of(history, delta, multi_run.FILTER, plan)
        table.add_row("Renyi filter", rounded_up(spent), COUNTS, style="bold")
    table.add_row(
        "PLD",
        rounded_up(accounting.epsilon_of(history, delta)),
        "if all runs were fixed beforehand" if is_shared else COUNTS,
        style=None if is_shared else "bold",
    )
    bounded = set()
    for name, heading, good_for, why_not in (*OTHERS, *((SECOND,) if second_opinion else ())):
        try:
            table.add_row(heading, rounded_up(accounting.epsilon_of(history, delta, name)), good_for)
            bounded.add(name)
        except UnsupportedEventError:
            table.add_row(heading, "-", why_not)
    if "gdp" not in bounded:  # otherwise the run is one Gaussian mechanism, and nothing is approximated
        approximate = accounting.central_limit_of(history).epsilon_if_it_were_true(delta)
        table.add_row("central limit", f"({approximate:.4g})", "no guarantee: may be too low")
    return table
