"""`clipwise train`: from data to a private model, its ledger and its report."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from clipwise.cli.options import AsJson, epsilon_of, labels_of, takes_options
from clipwise.cli.output import counted
from clipwise.cli.progress import Display
from clipwise.errors import ConfigurationError
from clipwise.recipes.config import Choices, choices_of, flag
from clipwise.recipes.estimate import Estimate, estimate
from clipwise.recipes.finish import evaluate, public_reference, write_documents
from clipwise.recipes.interrupts import Interrupts
from clipwise.recipes.kind import Task
from clipwise.recipes.planning import RunPlan, plan_of
from clipwise.recipes.run_folder import RunFolder, fresh_folder
from clipwise.recipes.sources import public_test, require_public_test
from clipwise.recipes.train import PreparedRun, begin, reopened
from clipwise.recipes.train import train as train_run

INTERRUPTED = 130
SHOWN_LABELS = 10


@dataclass(frozen=True)
class TrainOptions:
    """The choices of a user, by the names of `Choices`. None means that the option was left out."""

    path: Annotated[
        str | None,
        typer.Argument(
            metavar="DATA",
            help="A CSV or Parquet file, a folder of images or texts, idx, npz or CIFAR files, the name of a data set "
            "in --data-folder, or module:function, which returns (model, data set, loss).",
        ),
    ] = None
    target: Annotated[str | None, typer.Option(help="The column to predict.")] = None
    text: Annotated[str | None, typer.Option(help="The column with the text, for text.")] = None
    labels: Annotated[
        str | None, typer.Option(help="The values of the target, with commas; else a share of the budget finds them.")
    ] = None
    schema: Annotated[str | None, typer.Option(help="A schema file of a table; see clipwise schema.")] = None
    task: Annotated[
        str | None, typer.Option(help="classification or regression, for a table; by default noised counts decide.")
    ] = None
    balanced: Annotated[
        bool | None, typer.Option("--balanced", help="Weight classes by the inverse of their noised frequencies.")
    ] = None
    encoding: Annotated[str | None, typer.Option(help="The encoding of text in files, such as latin-1.")] = None
    image_size: Annotated[int | None, typer.Option(help="The side of images in pixels; by default at most 64.")] = None
    grey: Annotated[bool | None, typer.Option("--grey", help="Drop the colours of images.")] = None
    data_kind: Annotated[str | None, typer.Option("--kind", help="table, images, text or function.")] = None
    data_folder: Annotated[str | None, typer.Option(help="The folder of data sets that are given by name.")] = None
    epsilon: Annotated[str | None, typer.Option(help="The budget: a number such as 3, or none, without privacy.")] = (
        None
    )
    delta: Annotated[
        float | None,
        typer.Option(help="The delta of the guarantee; by default well below one over the number of rows."),
    ] = None
    preset: Annotated[str | None, typer.Option(help="fast (the default) or best.")] = None
    model: Annotated[str | None, typer.Option(help="The model, such as mlp or tanh-cnn; see docs/guides/train.md.")] = (
        None
    )
    batch_size: Annotated[int | None, typer.Option(help="The expected number of records per step.")] = None
    epochs: Annotated[float | None, typer.Option(help="The number of passes over the training rows.")] = None
    learning_rate: Annotated[float | None, typer.Option(help="The learning rate.")] = None
    max_norm: Annotated[float | None, typer.Option(help="The clipping norm of the gradient of one record.")] = None
    optimizer: Annotated[str | None, typer.Option(help="sgd, adam or adamw.")] = None
    ema: Annotated[float | None, typer.Option(help="The decay of the average of the weights, such as 0.99.")] = None
    views: Annotated[int | None, typer.Option("--augmentation", help="Random views of each image in a step.")] = None
    hold_out: Annotated[
        float | None, typer.Option(help="The share of rows that is held out for the accuracy; 0.1 by default.")
    ] = None
    public_test: Annotated[str | None, typer.Option(help="Rows that you declare public, for an exact accuracy.")] = None
    groups: Annotated[
        str | None, typer.Option(help="A column: also release the accuracy for each of its categories.")
    ] = None
    public_reference: Annotated[
        str | None, typer.Option(help="A run with --epsilon none on data that you declare public, for the report.")
    ] = None
    device: Annotated[str | None, typer.Option(help="auto (the default), cpu or cuda.")] = None
    seed: Annotated[int | None, typer.Option(help="Reproducible noise and batches: no guarantee is claimed.")] = None

    def given(self) -> dict[str, Any]:
        """The fields of `Choices` that the user gave."""
        values = vars(self) | {"labels": labels_of(self.labels), "epsilon": epsilon_of(self.epsilon)}
        return {name: value for name, value in values.items() if value is not None}


@takes_options
def train(
    options: TrainOptions,
    out: Annotated[Path | None, typer.Option(help="Folder of the run, or OUT-2, OUT-3, ... if it exists.")] = None,
    name: Annotated[str | None, typer.Option(help="Instead of --out: the name of the run, in runs/NAME.")] = None,
    config: Annotated[Path | None, typer.Option(help="A configuration file, such as the config.toml of a run.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue this run, which was interrupted.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the plan, its cost and its time.")] = False,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but warnings and errors.")] = False,
) -> None:
    """Train a model on your data under differential privacy, and write a report about it.

    For example:

        clipwise train data.csv --target income --epsilon 3

        clipwise train images/ --epsilon 8

        clipwise train reviews.csv --text review --target label --epsilon 3

    Epsilon bounds what the model, and all figures in its report, reveal about any single row. Ranges, categories and
    labels that --schema and --labels do not declare are found by noised counts, which take a share of the budget. A
    tenth of the rows is held out, by position, for one noised figure of accuracy.

    The folder of the run has the weights, the ledger of every release, the configuration, the metrics, the statement,
    a model card and report.html. Ctrl-C ends a run cleanly; --resume continues it.

    Exit codes: 0 done; 1 a defect of clipwise or of your own code, with a traceback; 2 an argument or the data cannot
    be used; 130 interrupted, and the run can be resumed.
    """
    if resume is not None:
        others = {"dry_run": dry_run or None, "config": config, "out": out, "name": name}
        given = options.given() | {key: value for key, value in others.items() if value is not None}
        _continue(resume, given, as_json, quiet)
        return
    choices = choices_of(options.given(), config)
    if not choices.path:
        raise ConfigurationError("DATA is needed: a file, a folder, or module:function with the data to train on.")
    reference = _reference(choices)
    plan = plan_of(choices)
    require_public_test(choices, plan.source)
    display = Display(choices.epsilon if choices.is_private else None, as_json=as_json, quiet=quiet)
    if dry_run:
        _show(estimate(plan), display)
        return
    folder = RunFolder(fresh_folder(_wanted(out, name, choices)))
    with stopping(display) as stop:
        _announce(plan, folder, display)
        run = begin(plan, folder, shlex.join(["clipwise", *sys.argv[1:]]))
        _announce_task(run.encoder.task, display)
        follow(run, display, stop, reference)


def follow(run: PreparedRun, display: Display, stop: Interrupts, reference: dict[str, Any] | None = None) -> None:
    """Train a prepared run, evaluate it and write its documents, with a display of its progress."""
    folder = run.folder
    test = public_test(run.plan.choices, run.encoder)  # opened first, so that a wrong path costs nothing
    if not folder.is_finished:
        with display:
            is_complete = train_run(run, display.watch, stop)
        if not is_complete:
            hint = f"Continue with: clipwise train --resume {folder.path}"
            restart = "A run without privacy cannot be continued."
            display.warn(f"Interrupted. {hint if run.plan.event is not None else restart}")
            raise typer.Exit(INTERRUPTED)
    labels = run.encoder.task.labels or ()
    for figure in evaluate(run.plan, run.encoder, folder, test):
        display.released(figure.to_dict())
        if figure.group is None and figure.high * len(labels) < 1 and labels:
            display.warn("warning: guessing is better than this model. Are --labels spelled as in the data?")
    report = write_documents(folder, reference)
    display.line(f"The run is in {folder.path}, its report in {report}", kind="done", folder=str(folder.path))


def stopping(display: Display) -> Interrupts:
    """Ends a run cleanly at the first Ctrl-C."""
    return Interrupts(lambda: display.warn("Stopping after this step. Press Ctrl-C again to stop at once."))


def _continue(path: Path, given: dict[str, Any], as_json: bool, quiet: bool) -> None:
    device = {name: given.pop(name) for name in ("device",) if name in given}
    if given:
        other = flag(next(iter(given)))
        raise ConfigurationError(
            f"--resume continues a run with its own settings, and {other} was given as well: leave it out, or begin a "
            "new run."
        )
    run = reopened(RunFolder.existing(path), **device)
    choices = run.plan.choices
    display = Display(choices.epsilon if choices.is_private else None, as_json=as_json, quiet=quiet)
    with stopping(display) as stop:
        follow(run, display, stop, _reference(choices))


def _reference(choices: Choices) -> dict[str, Any] | None:
    return None if choices.public_reference is None else public_reference(Path(choices.public_reference))


def _wanted(out: Path | None, name: str | None, choices: Choices) -> Path:
    if out is not None and name is not None:
        raise ConfigurationError("Give --out or --name, not both.")
    if out is not None:
        return out
    if name is None:
        plain = Path(choices.path.split(":")[-1]).name.split(".")[0] or "run"
        name = f"{plain}-{'without-privacy' if not choices.is_private else f'epsilon-{choices.epsilon:g}'}"
    return Path("runs") / name


def _announce(plan: RunPlan, folder: RunFolder, display: Display) -> None:
    rows = counted(len(plan.training_rows), "training row")
    if len(plan.held_out_rows):
        rows += f", {counted(len(plan.held_out_rows), 'held-out row')}"
    budget = "without privacy"
    if plan.event is not None:
        budget = f"epsilon {plan.epsilon:g} at delta {plan.delta:g}"
    if plan.choices.seed is not None:
        display.warn("warning: --seed makes noise and batches reproducible, so no guarantee is claimed for this run.")
    display.line(
        f"{folder.path}: {rows}, {budget}, {plan.settings.model}, {counted(plan.steps, 'step')}",
        kind="plan",
        folder=str(folder.path),
        training_rows=len(plan.training_rows),
        held_out_rows=len(plan.held_out_rows),
        epsilon=None if plan.event is None else plan.epsilon,
        delta=plan.delta,
        model=plan.settings.model,
        steps=plan.steps,
    )


def _announce_task(task: Task, display: Display) -> None:
    """What is predicted: declared, or released by the noised counts."""
    if task.labels is not None:
        shown = ", ".join(task.labels[:SHOWN_LABELS]) + ", ..." * (len(task.labels) > SHOWN_LABELS)
        display.line(f"predicts one of {len(task.labels)} labels: {shown}", kind="task", labels=task.labels)
    elif task.range is not None:
        low, high = task.range
        text = f"predicts a number from {low:g} to {high:g}; for classes give --task classification or --labels"
        display.line(text, kind="task", range=task.range)


def _show(found: Estimate, display: Display) -> None:
    width = max(len(name) for name, _ in found.lines)
    text = "\n".join(f"{name:<{width}}  {value}" for name, value in found.lines)
    display.line(f"{text}\n\nNothing was trained, released or written.", kind="dry-run", **found.values)
