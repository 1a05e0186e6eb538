"""`clipwise predict`: predictions of a trained model."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from clipwise.cli.options import FileEncoding, RunPath
from clipwise.cli.output import remark
from clipwise.errors import ConfigurationError
from clipwise.recipes.predict import predictions, write_table


def predict(
    run: RunPath,
    data: Annotated[
        Path, typer.Argument(help="Records like those that the run was trained on. The target may be missing.")
    ],
    out: Annotated[Path | None, typer.Option(help="A CSV file for the predictions; by default stdout.")] = None,
    encoding: FileEncoding = None,
) -> None:
    """Predict the target of further records with the model of a run.

    For example:

        clipwise predict runs/data-epsilon-3 new.csv --out predictions.csv

    The output has one line for each record: the label and the probability of each label, or the number. Predictions of
    a private model are covered by its guarantee, which protects the training records but not the predicted ones.
    """
    lines = predictions(run, data, encoding)
    if out is None:
        write_table(lines, sys.stdout)
        return
    header = next(lines)  # the model and the data are read before the file is written
    try:
        with open(out, "w", newline="", encoding="utf-8") as file:
            count = write_table(iter([header, *lines]), file)
    except OSError as error:
        raise ConfigurationError(f"--out {os.fspath(out)} cannot be written: {error.strerror}.") from error
    remark(f"{count} predictions are in {out}")
