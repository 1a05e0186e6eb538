"""What `clipwise train` does after the training: figures of accuracy, the statement, the report and the model card."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from clipwise.errors import ConfigurationError
from clipwise.recipes.evaluate import Figure, exact_figures, groups_of, noised_figures, scores
from clipwise.recipes.kind import Encoder, Source
from clipwise.recipes.planning import RunPlan
from clipwise.recipes.run_folder import RunFolder
from clipwise.report.model_card import write_model_card
from clipwise.report.page import write_page
from clipwise.report.run_statement import write_statement


def evaluate(plan: RunPlan, encoder: Encoder, folder: RunFolder, public_test: Source | None) -> list[Figure]:
    """Release the accuracy on the held-out rows, once, and compute it on the public test rows.

    A run that was interrupted after the release does not repeat it: the budget of the held-out rows is spent.
    """
    model = trained_model(encoder, plan.settings.model, folder)
    found: list[Figure] = []
    rows, groups = plan.held_out_rows, plan.choices.groups
    if len(rows) and not folder.evaluation_ledger.exists() and not folder.released():
        score_N = scores(model, encoder, plan.source, rows)
        of_rows = groups_of(plan.source, encoder, groups, rows)
        if plan.evaluation is None:
            found += exact_figures(encoder, score_N, of_rows, "held-out")
        else:
            found += noised_figures(
                encoder,
                score_N,
                plan.evaluation,
                folder.evaluation_ledger,
                epsilon=plan.epsilon,
                delta=plan.delta,
                groups=of_rows,
                seed=plan.choices.seed,
            )
    if public_test is not None:
        of_rows = groups_of(public_test, encoder, groups, None)
        found += exact_figures(encoder, scores(model, encoder, public_test), of_rows)
    for figure in found:
        folder.record("released", **figure.to_dict(), step=plan.steps)
    return found


def trained_model(encoder: Encoder, name: str, folder: RunFolder) -> nn.Module:
    """The model of a run, with the released weights."""
    with torch.random.fork_rng(devices=[]):
        model = encoder.model(name)
    model.load_state_dict(folder.load_model())
    return model.eval()


def public_reference(path: Path) -> dict[str, Any]:
    """The figures of a run without privacy. The user declares that its data are public."""
    folder = RunFolder.existing(path)
    if folder.read_config().get("privacy", {}).get("epsilon") != "none":
        raise ConfigurationError(
            f"--public-reference {path} is a private run: give one that was trained with --epsilon none on public data."
        )
    figures = [line for line in folder.released() if line["group"] is None]
    if not figures:
        raise ConfigurationError(f"--public-reference {path} has no figure of accuracy to compare with.")
    return {key: figures[-1][key] for key in ("name", "value", "low", "high", "rows")} | {"run": folder.path.name}


def write_documents(folder: RunFolder, reference: Mapping[str, Any] | None = None) -> Path:
    """Write statement.json, model_card.md and report.html, and return the path of the report."""
    if reference is not None:
        folder.write_config({**folder.read_config(), "public_reference": reference})
    write_statement(folder.path)
    write_model_card(folder.path)
    return write_page(folder.path)


def rounded(figure: Mapping[str, Any]) -> str:
    """A figure with its interval, for a terminal."""
    name, value, low, high = (figure[key] for key in ("name", "value", "low", "high"))
    group = "" if figure.get("group") is None else f" of {figure['group']}"
    where = f"on {figure['rows'].replace('public-test', 'public test')} rows"
    if name == "accuracy":
        if (low, high) == (0, 1):
            return f"accuracy{group} {where}: not known, because there are too few of them"
        return f"accuracy{group} {value:.1%} ({low:.1%} to {high:.1%}) {where}"
    digits = max(0, 3 - math.floor(math.log10(value or high or 1.0)))
    shown = f"{value:.{digits}f}" if value > 0 else "too small for the noise"
    return f"{name} {shown} ({low:.{digits}f} to {high:.{digits}f}) {where}"
