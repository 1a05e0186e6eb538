"""`clipwise tune`: settings for a data set or a script, and what the search costs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from safetensors.torch import save_file

from benchmarks.environment import device_of
from clipwise.cli.output import rounded_up, say, stdout
from clipwise.cli.places import require_folder
from clipwise.cli.target import running
from clipwise.errors import ConfigurationError
from clipwise.tune import accounted, report, study, subject
from clipwise.tune.front import Point, front
from clipwise.tune.selection import composed_epsilon


def tune(
    what: Annotated[str, typer.Argument(help="A data set by name, or a script that ends in .py.")],
    method: Annotated[
        str | None, typer.Option(help="For a data set: dp-sgd, lip or fix-lip; dp-sgd if left out.")
    ] = None,
    norm: Annotated[
        str | None,
        typer.Option(
            help="For a data set: none, group, or bounded, a group norm with a floor; none if left out."
        ),
    ] = None,
    trials: Annotated[
        int | None, typer.Option(min=1, help="Finished runs that the study shall have; 30 if left out.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="For a data set: the folder of data sets; if left out, CLIPWISE_DATA names it."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="For a data set: cpu or cuda; cpu if left out.")] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Of the search and of first weights, not of any noise.")
    ] = 0,
    is_accounted: Annotated[
        bool,
        typer.Option(
            "--accounted", help="A random, secret number of runs; only the best is shown, and counted."
        ),
    ] = False,
    epsilon: Annotated[
        float | None, typer.Option(help="With --accounted: what the whole search may cost; 3 if left out.")
    ] = None,
    mean_runs: Annotated[
        float | None, typer.Option(help="With --accounted: runs on average, more than 1; 10 if left out.")
    ] = None,
    sample_rate: Annotated[
        float | None, typer.Option(help="With --accounted: of every run; 0.05 if left out.")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="With --accounted: of every run; 10 if left out.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The folder of the study; runs/tune if left out. A study there goes on."),
    ] = None,
) -> None:
    """Search settings for high accuracy and a small epsilon at once, and show the Pareto front.

    For example, on the digits that ship with clipwise:

        clipwise tune digits --trials 20

    Or a script of your own, with SPACE and train(settings) -> (accuracy, epsilon), accuracy from 0 to 1:

        clipwise tune my_script.py --trials 50

    Or with the privacy of the search itself accounted for:

        clipwise tune digits --accounted --epsilon 3 --mean-runs 10

    The folder gets study.db, results.json, front.md and front.svg; a command that was stopped goes on there.
    Where it has results of another study, the last three go into a folder below, named after the study. With
    --accounted it gets best.safetensors, the weights of the best run, if --out is given.
    """
    is_script = what.endswith(".py")
    if is_script:
        _require_data_set(what, {"method": method, "norm": norm, "data": data, "device": device})
    method = "dp-sgd" if method is None else method
    norm = "none" if norm is None else norm
    place = device_of("cpu" if device is None else device)
    if is_accounted:
        if trials is not None:
            raise ConfigurationError(
                "--trials does not go with --accounted, where the number of runs is drawn and stays secret: give "
                "--mean-runs, how many there are on average."
            )
        _accounted(
            what,
            method,
            norm,
            data,
            place,
            seed,
            3.0 if epsilon is None else epsilon,
            10.0 if mean_runs is None else mean_runs,
            0.05 if sample_rate is None else sample_rate,
            10 if epochs is None else epochs,
            out,
        )
        return
    _require_accounted(
        {"epsilon": epsilon, "mean-runs": mean_runs, "sample-rate": sample_rate, "epochs": epochs}
    )
    folder = out or Path("runs/tune")
    require_folder(folder)
    with running(what) if is_script else nullcontext():
        about = (
            subject.of_script(Path(what))
            if is_script
            else subject.named(what, method, norm, data, place, seed)
        )
        found = study.search(about, 30 if trials is None else trials, folder, say, seed=seed)
    stdout().print(_table([p for p, _ in found]))
    for file in report.write(about.name, found, folder):
        say(f"wrote {file}")
    for sentence in report.cost_in_words(len(found), composed_epsilon([s for _, s in found])):
        say(sentence)


def _require_data_set(script: str, given: Mapping[str, object]) -> None:
    """Refuse options of named data sets, which a script would not be told of."""
    for name, value in given.items():
        if value is not None:
            raise ConfigurationError(
                f"--{name} goes with a data set by name: {Path(script).name} chooses for itself, so leave it out and "
                "say it in train(settings)."
            )


def _require_accounted(given: dict[str, float | None]) -> None:
    """Refuse options that would not be looked at."""
    for name, value in given.items():
        if value is not None:
            raise ConfigurationError(
                f"--{name} goes with --accounted: an ordinary search chooses noise, batches and length by itself."
            )


def _accounted(
    what: str,
    method: str,
    norm: str,
    data: Path | None,
    device: torch.device,
    seed: int,
    epsilon: float,
    mean_runs: float,
    sample_rate: float,
    epochs: int,
    out: Path | None,
) -> None:
    if what.endswith(".py"):
        raise ConfigurationError(
            "--accounted takes a data set by name: it has to know what every run releases. For a script of your own, "
            "call clipwise.tune.selection.plan and select."
        )
    accounted.require_possible(method, norm, epsilon, mean_runs, sample_rate)
    if out is not None:
        require_folder(out)
        out.mkdir(parents=True, exist_ok=True)  # before the search: what it found cannot be found again
    found = accounted.search(
        what,
        method,
        norm,
        data,
        device,
        epsilon=epsilon,
        mean_runs=mean_runs,
        sample_rate=sample_rate,
        epochs=epochs,
        seed=seed,
    )
    for sentence in found.in_words():
        say(sentence)
    if found.released is not None and out is not None:
        save_file(found.released.output.state_dict(), out / "best.safetensors")
        say(f"wrote {out / 'best.safetensors'}")


def _table(points: list[Point]) -> Table:
    best = front(points)
    names: list[Any] = list(best[0].settings) if best else []
    table = Table("epsilon", "accuracy", *names, title="Runs that no other beats", title_justify="left")
    for p in best:
        values = (p.settings.get(n) for n in names)
        told = (f"{v:.3g}" if isinstance(v, float) else str(v) for v in values)
        table.add_row(rounded_up(p.epsilon), f"{p.accuracy:.2%}", *told)
    return table
