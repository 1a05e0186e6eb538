"""`clipwise audit`: attack a run and compare the result with the guarantee in its ledger."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from clipwise import audit as auditing
from clipwise.audit.canary import least_runs
from clipwise.audit.report import AuditReport
from clipwise.cli.options import AsJson
from clipwise.cli.output import draw, remark, require_picture, rounded_up, say, say_json, stdout
from clipwise.errors import ConfigurationError
from clipwise.ledger import ledger
from clipwise.privacy import Entry
from clipwise.recipes.target import call, running
from clipwise.report.record import LEDGER
from clipwise.validation.arguments import number, whole

SUBJECT = "subject.py"
KINDS = ("dirac", "mislabelled")


def audit(
    run: Annotated[Path, typer.Argument(help="The run's folder, with its ledger in it, or the ledger file.")],
    subject: Annotated[
        str | None,
        typer.Option(
            help="path/to/file.py:function or package.module:function, which returns (make_run, dataset), or "
            "(make_run, dataset, loss) for --kind mislabelled. By default subject.py:subject in the folder."
        ),
    ] = None,
    runs: Annotated[int, typer.Option(min=0, help="Runs with a canary, and as many without; 0 for none.")] = 100,
    kind: Annotated[
        str,
        typer.Option(help="The canary: dirac (the worst-case gradient), or mislabelled (for Lipschitz and Backprop)."),
    ] = "dirac",
    canaries: Annotated[int, typer.Option(min=0, help="Canaries to plant in one further run; 0 for none.")] = 0,
    confidence: Annotated[float, typer.Option(help="Confidence of each attack's bounds.")] = 0.95,
    delta: Annotated[float | None, typer.Option(help="The delta of epsilon; by default the run's.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the canaries and the noise.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Plot both curves to this file: .png or .svg.")] = None,
    as_json: AsJson = False,
) -> None:
    """Attack a run and compare what the attacks achieve with the guarantee in its ledger.

    For example:

        clipwise audit runs/mine --subject my_run.py:subject --runs 1000

    where my_run.py has, for instance:

        def subject():
            return train, dataset, loss  # train(dataset) trains as the run did; loss(model, *batch), one per example

    The audit compares two neighbouring runs release by release. It then trains the model many times, with and without a
    canary (a planted record). How well an attacker distinguishes the two gives lower bounds on epsilon and mu. A lower
    bound above the claim shows a bug; one below it proves nothing. Use synthetic or public records: audits see sums
    without noise.

    Exit code 0: within the claim. 1: more than claimed. 2: the audit could not run.
    """
    file = run / LEDGER if run.is_dir() else run
    claimed = ledger.read(file)
    usual = file.parent / SUBJECT
    if subject is None and not usual.is_file():
        raise ConfigurationError(
            f"There is no file {usual}: give --subject path/to/file.py:function, a function that returns "
            "(make_run, dataset)."
        )
    target = f"{usual}:subject" if subject is None else subject
    if kind not in KINDS:
        raise ConfigurationError(f"--kind {kind} is not known: use one of {', '.join(KINDS)}.")
    if 0 < runs < least_runs(kind):
        raise ConfigurationError(
            f"--runs={runs} is not possible with --kind {kind}: give at least {least_runs(kind)}, or 0 to skip this "
            "attack."
        )
    number("--confidence", confidence, least=0.5, below=1)
    require_picture(plot)
    if plot is not None and not (runs or canaries):
        raise ConfigurationError(
            "--plot needs an attack, and --runs 0 without --canaries runs none: give --runs or --canaries, or leave "
            "out --plot."
        )
    if delta is not None:
        number("--delta", delta, above=0, below=1)
    make_run, dataset, loss = _subject(target)
    if canaries:
        whole("--canaries", canaries, least=2, most=len(dataset))
    if kind == "mislabelled" and runs and loss is None:
        raise ConfigurationError(
            f"--kind mislabelled needs a loss: let {target} return (make_run, dataset, loss), where "
            "loss(model, *batch) returns one loss per example."
        )
    reports: list[AuditReport] = []
    common: dict[str, Any] = {"delta": delta, "confidence": confidence, "seed": seed}
    with running(target):
        compared = auditing.neighbours(make_run, dataset, seed=seed)
        _require_same_run(claimed.history, compared.history, target)
        if runs:
            remark(f"Training {runs} times with a canary and {runs} times without.")
            reports.append(auditing.canary(make_run, dataset, kind=kind, loss=loss, runs=runs, **common))
        if canaries:
            remark(f"Training once with {canaries} canaries.")
            reports.append(auditing.one_run(make_run, dataset, canaries=canaries, **common))
    draw(plot, lambda file: max(reports, key=lambda report: report.measured.mu).draw(file))
    ok = compared.ok and all(report.ok for report in reports)
    if as_json:
        content: dict[str, Any] = {"format": 1, "run": claimed.run, "ok": ok}
        content["neighbours"] = {"ok": compared.ok, "findings": [str(f) for f in compared.findings]}
        content["attacks"] = [report.to_dict() for report in reports]
        say_json(content)
    else:
        say(f"Run {claimed.run}, {claimed.position} releases")
        say(f"Neighbours. {compared}", style="" if compared.ok else "red")
        for report in reports:
            m = report.measured
            say(f"{m.attack}: {m.how_often}, {m.right} of {m.guesses} guesses right, confidence {m.confidence:.10g}")
            stdout().print(_table(report))
        say(
            "Within the claim: no attack exceeded what the guarantee allows. This is no proof."
            if ok
            else "MORE THAN CLAIMED: the run is less private than its ledger states.",
            style="" if ok else "red",
        )
    raise typer.Exit(0 if ok else 1)


def _subject(target: str) -> tuple[Any, Any, Any]:
    made = call(target, "--subject")
    if isinstance(made, tuple) and len(made) in (2, 3) and hasattr(made[1], "__len__"):
        make_run, dataset, loss = (*made, None)[:3]
        if callable(make_run) and (loss is None or callable(loss)):
            return make_run, dataset, loss
    raise ConfigurationError(
        f"{target} must return (make_run, dataset) or (make_run, dataset, loss), where make_run trains on the data "
        "set it is given, as the run did."
    )


def _require_same_run(ours: Sequence[Entry], theirs: Sequence[Entry], target: str) -> None:
    """The attacked run must charge exactly the events of the ledger."""
    counts: list[Counter[str]] = [Counter(), Counter()]
    for count, history in zip(counts, (ours, theirs), strict=True):
        for entry in history:
            count[json.dumps(entry.event.to_dict(), sort_keys=True)] += entry.count
    if counts[0] != counts[1]:
        raise ConfigurationError(
            f"{target} makes a different run from the one in the ledger: it must charge the same events the same "
            "number of times (sampling, rate, noise multiplier, number of steps, size of the data set)."
        )


def _table(report: AuditReport) -> Table:
    m, c = report.measured, report.claim
    table = Table("", "claimed, at most", "measured, at least")
    table.add_row(f"epsilon at delta {c.delta:g}", rounded_up(c.epsilon), f"{m.epsilon:.4g}")
    table.add_row("mu", rounded_up(c.mu), f"{m.mu:.4g}")
    return table
