"""Predictions of a trained model for further records, as a table."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from clipwise.errors import ConfigurationError
from clipwise.recipes.evaluate import outputs_of
from clipwise.recipes.finish import trained_model
from clipwise.recipes.functions import FunctionEncoder
from clipwise.recipes.kind import Encoder
from clipwise.recipes.run_folder import RunFolder
from clipwise.recipes.sources import encoder_from, open_further


def open_run(path: Path) -> tuple[RunFolder, Encoder, str]:
    """The folder of a finished run, the encoder of its data, and the name of its model."""
    folder = RunFolder.existing(path)
    content = folder.read_config()
    if "encoding" not in content:
        raise ConfigurationError(f"{path} has no encoding of its data: the run was interrupted before it was trained.")
    if content["encoding"]["kind"] == FunctionEncoder.kind:
        raise ConfigurationError(
            f"{path} has the model of your own function: load {folder.model.name} into it and use it in your own code."
        )
    return folder, encoder_from(content["encoding"]), str(content["training"]["model"])


def predictions(path: Path, data: Path, encoding: str | None = None) -> Iterator[list[str]]:
    """A header and one line for each record: the label and the probability of each label, or the predicted number."""
    folder, encoder, name = open_run(path)
    model = trained_model(encoder, name, folder)
    output = outputs_of(model, encoder.inputs(open_further(encoder, data, encoding)))
    if encoder.task.labels is None:
        yield ["prediction"]
        yield from ([f"{value:.7g}"] for value in output.reshape(-1).tolist())
        return
    labels = encoder.task.labels
    yield ["prediction", *(f"probability of {label}" for label in labels)]
    for row in output.softmax(1).tolist():
        yield [labels[row.index(max(row))], *(f"{value:.6g}" for value in row)]


def write_table(lines: Iterator[list[str]], file: IO[str]) -> int:
    """Write the lines as CSV. Returns the number of records."""
    writer, count = csv.writer(file, lineterminator="\n"), -1
    for line in lines:
        writer.writerow(line)
        count += 1
    return count
