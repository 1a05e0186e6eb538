"""`clipwise tune`: search the settings of a recipe or a script, and account for the search."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from safetensors.torch import save_file

from clipwise.cli.output import say, stdout
from clipwise.errors import ConfigurationError
from clipwise.ledger.durable_files import require_folder
from clipwise.recipes.target import running
from clipwise.recipes.tuning import RECIPES
from clipwise.tune import Recipe, Subject, selection, study
from clipwise.tune.subject import of_script


def tune(
    what: Annotated[str, typer.Argument(help="A recipe (digits), or a script: path/to/file.py[:function].")],
    trials: Annotated[int | None, typer.Option(min=1, help="The number of finished runs; by default 30.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="The seed of search and initial weights, never of noise.")] = 0,
    is_accounted: Annotated[
        bool, typer.Option("--accounted", help="Draw a secret number of runs, release the best, account for all.")
    ] = False,
    epsilon: Annotated[float | None, typer.Option(help="With --accounted: the whole budget; by default 3.")] = None,
    mean_runs: Annotated[
        float | None, typer.Option(help="With --accounted: mean number of runs; by default 10.")
    ] = None,
    sample_rate: Annotated[float | None, typer.Option(help="With --accounted: sampling rate; by default 0.05.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="With --accounted: epochs of a run; by default 10.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="A new folder, or that of a study to continue; by default runs/tune.")
    ] = None,
) -> None:
    """Search settings for high accuracy and small epsilon, and show the Pareto front.

    For example, the demo's network on the digits that ship with clipwise:

        clipwise tune digits --trials 20

    Or a script of your own, with SPACE and train(settings) -> (accuracy, epsilon), accuracy from 0 to 1:

        clipwise tune my_script.py --trials 50

    Or with the privacy of the search itself accounted for:

        clipwise tune digits --accounted --epsilon 3 --mean-runs 10

    The command writes study.db to the folder, and results.json, front.md and front.svg to a subfolder named after the
    study. It continues a study that was stopped there. With --accounted and --out it writes best.safetensors, the
    weights of the best run.
    """
    path, _, function = what.partition(".py:")
    is_script = bool(function) or what.endswith(".py")
    if not is_script and what not in RECIPES:
        raise ConfigurationError(
            f"{what!r} is not a recipe or a script: give {', '.join(RECIPES)}, or a file that ends in .py."
        )
    of_accounted = {"epsilon": epsilon, "mean_runs": mean_runs, "sample_rate": sample_rate, "epochs": epochs}
    given = {name: value for name, value in of_accounted.items() if value is not None}
    if is_accounted and is_script:
        raise ConfigurationError(
            "--accounted requires a recipe, because the releases of a script are unknown. For a script of your own, "
            "call clipwise.tune.selection.plan and select."
        )
    if is_accounted:
        search_accounted(RECIPES[what], given, trials, out, seed)
        return
    require_no_options_of_accounted(given)
    with running(what) if is_script else nullcontext():
        if is_script:
            file = Path(f"{path}.py" if function else path)
            subject = of_script(file, function or "train")
        else:
            subject = RECIPES[what].subject(seed)
        search_openly(subject, trials, out, seed)


def require_no_options_of_accounted(given: dict[str, float]) -> None:
    """Refuse options that an ordinary search would ignore."""
    for name in given:
        raise ConfigurationError(
            f"--{name.replace('_', '-')} requires --accounted: an ordinary search chooses noise, batches and length."
        )


def search_openly(subject: Subject, trials: int | None, out: Path | None, seed: int) -> None:
    """Search, print the Pareto front and write it to a folder."""
    folder = out or Path("runs/tune")
    require_folder(folder)
    found = study.search(subject, 30 if trials is None else trials, folder, say, seed=seed)
    head, *rows = study.table(found)
    table = Table(*head, title="Runs on the Pareto front", title_justify="left")
    for row in rows:
        table.add_row(*row)
    stdout().print(table)
    for file in study.write(subject.name, found, folder):
        say(f"wrote {file}")
    for sentence in study.cost_in_words(found):
        say(sentence)


def search_accounted(recipe: Recipe, given: dict[str, float], trials: int | None, out: Path | None, seed: int) -> None:
    """Search with a secret number of runs; print and save the best."""
    if trials is not None:
        raise ConfigurationError(
            "--trials is not possible with --accounted, where the number of runs is drawn and stays secret: give "
            "--mean-runs, their mean number."
        )
    plan, shared = selection.planned(recipe, **given)  # type: ignore[arg-type]  # typer has checked the types
    if out is not None:
        require_folder(out)  # before the search, because its result cannot be computed again
    released = selection.search(recipe, plan, shared, seed)
    for sentence in selection.in_words(plan, released):
        say(sentence)
    if released is not None and out is not None:
        save_file(released.output.state_dict(), out / "best.safetensors")
        say(f"wrote {out / 'best.safetensors'}")
