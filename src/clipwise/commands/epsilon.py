"""`clipwise epsilon`: what training costs, or what a ledger says that it has cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from clipwise import accounting, ledger
from clipwise.commands import plan
from clipwise.commands.output import in_words, rounded_up, say, stdout
from clipwise.errors import ConfigurationError, LedgerError, UnsupportedEventError
from clipwise.ledger import Snapshot
from clipwise.privacy import Entry, Event, Sampling, Unit


def epsilon(
    noise_multiplier: Annotated[
        float | None,
        typer.Option(help="Standard deviation of the noise over the sensitivity of the clipped sum."),
    ] = None,
    sample_rate: plan.SampleRate = None,
    batch_size: plan.BatchSize = None,
    dataset_size: plan.DatasetSize = None,
    steps: plan.Steps = None,
    epochs: plan.Epochs = None,
    delta: plan.Delta = 1e-5,
    sampling: plan.HowSampled = Sampling.POISSON,
    adjacency: plan.Neighbours = None,
    ledger_path: Annotated[
        Path | None,
        typer.Option("--ledger", help="In place of all but --delta: count what is in this ledger file."),
    ] = None,
) -> None:
    """What a training run costs: the smallest epsilon at the given delta.

    For a run that you plan:

        clipwise epsilon --noise-multiplier 1.1 --batch-size 256 --dataset-size 60000 --epochs 60

    For a run that has happened (the file is only read, never changed, and may be in use):

        clipwise epsilon --ledger runs/demo/epsilon-8/ledger

    Smaller is more private: below 1 is strong, 1 to 10 is usual for trained models, and far above that little
    is promised. Both figures are upper bounds. PLD is the tight one and the one that counts; RDP is looser
    and cheap, which is why progress bars show it.
    """
    if ledger_path is not None:
        others = (noise_multiplier, sample_rate, batch_size, dataset_size, steps, epochs, adjacency)
        if any(value is not None for value in others) or sampling is not Sampling.POISSON:
            raise ConfigurationError("--ledger knows the run: give it alone, or together with --delta.")
        _of_ledger(ledger_path, delta)
        return
    if noise_multiplier is None:
        raise ConfigurationError("Give --noise-multiplier and the run, or --ledger and a file.")
    run = plan.plan_of(
        sampling=sampling,
        adjacency=adjacency,
        sample_rate=sample_rate,
        batch_size=batch_size,
        dataset_size=dataset_size,
        steps=steps,
        epochs=epochs,
        delta=delta,
    )
    event = Event(run.sampling, run.adjacency, Unit.RECORD, noise_multiplier, run.sample_rate, run.period)
    _print([Entry(event, run.steps)], delta, f"{run}, noise multiplier {noise_multiplier:g}")


def _of_ledger(path: Path, delta: float) -> None:
    found = ledger.read(path)
    if not found.history:
        raise LedgerError(f"{path} holds no release yet: nothing was spent.")
    for entry in found.history:
        e = entry.event
        say(
            f"{entry.count} releases: {e.sampling} sampling at rate {e.sample_rate:.6g}, {e.adjacency}, "
            f"noise multiplier {e.noise_multiplier:g}"
        )
    _print(found.history, delta, f"{found.position} releases of run {found.run}")
    _explain_end(found)


def _explain_end(found: Snapshot) -> None:
    if found.torn:
        say(
            "The last line of the ledger is torn, by a crash or by damage. The most it can stand for is counted."
        )
    elif not found.clean:
        say("The run is still going on, or did not end cleanly. All that it may have released is counted.")


def _print(history: list[Entry], delta: float, heading: str) -> None:
    tight = accounting.epsilon_of(history, delta, "pld")
    try:
        loose = rounded_up(accounting.epsilon_of(history, delta, "rdp"))
    except UnsupportedEventError:
        loose = "no bound"
    table = Table("accountant", f"epsilon at delta {delta:g}", "")
    table.add_row("PLD", rounded_up(tight), "the one that counts", style="bold")
    table.add_row("RDP", loose, "a looser bound, shown while training")
    say(heading)
    stdout().print(table)
    guarantee = history[0].event  # the accountants refuse a history that mixes adjacencies or units
    say(in_words(tight, delta, guarantee.adjacency, guarantee.unit))
