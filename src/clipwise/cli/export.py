"""`clipwise export`: the model of a run as ONNX or TorchScript."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clipwise.cli.options import RunPath
from clipwise.cli.output import say
from clipwise.recipes.export import export as export_model


def export(
    run: RunPath,
    kind: Annotated[str, typer.Option("--format", help="onnx, which needs clipwise-dp[export], or torchscript.")],
    out: Annotated[Path | None, typer.Option(help="The file; by default in the folder of the run.")] = None,
) -> None:
    """Write the model of a run as a file that runs without clipwise.

    For example:

        clipwise export runs/data-epsilon-3 --format onnx

    The input of the model is an encoded batch of any size. config.toml describes the encoding, and `clipwise predict`
    both encodes and predicts. An exported private model is covered by the guarantee of its run.
    """
    say(f"The model is in {export_model(run, kind, out)}")
