"""A trained model as a file that runs without clipwise: ONNX or TorchScript."""

from __future__ import annotations

import io
import logging
import warnings
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from clipwise.errors import ConfigurationError
from clipwise.recipes.finish import trained_model
from clipwise.recipes.predict import open_run

FORMATS = ("onnx", "torchscript")
ENDINGS = {"onnx": "model.onnx", "torchscript": "model.torchscript.pt"}


def export(run: Path, kind: str, file: Path | None = None) -> Path:
    """Write the model of a run.

    Its input is an encoded batch of any size, as `Encoder.inputs` makes it. Features in bfloat16 become float32, which
    every runtime and numpy support.
    """
    if kind not in FORMATS:
        raise ConfigurationError(f"--format {kind!r} is not known: use {' or '.join(FORMATS)}.")
    folder, encoder, name = open_run(run)
    model = trained_model(encoder, name, folder)
    rows = encoder.synthetic(2)
    if rows is None:
        raise ConfigurationError(
            f"--format {kind} is not possible for data of the kind {encoder.kind!r}: load {folder.model.name} into "
            "your own module instead."
        )
    inputs = tuple(x.float() if x.dtype == torch.bfloat16 else x for x in rows.tensors[:-1])
    path = folder.path / ENDINGS[kind] if file is None else file
    try:
        if kind == "onnx":
            _onnx(model, inputs, path)
        else:
            _torchscript(model, inputs, path)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}.") from error
    return path


def _onnx(model: nn.Module, inputs: tuple[Tensor, ...], path: Path) -> None:
    if find_spec("onnx") is None or find_spec("onnxscript") is None:
        raise ConfigurationError("--format onnx needs two more packages: pip install 'clipwise-dp[export]'.")
    names = [f"input_{place}" if len(inputs) > 1 else "input" for place in range(len(inputs))]
    batch = torch.export.Dim("batch", min=1)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it names optional packages that are not needed
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model,
            inputs,
            path,
            input_names=names,
            output_names=["output"],
            dynamic_shapes=tuple({0: batch} for _ in inputs),
            dynamo=True,
            verbose=False,
            external_data=False,
        )


def _torchscript(model: nn.Module, inputs: tuple[Tensor, ...], path: Path) -> None:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch prefers torch.export, which has no stable file format yet
        torch.jit.save(torch.jit.trace(model, inputs), buffer)  # type: ignore[no-untyped-call]
    path.write_bytes(buffer.getvalue())  # torch's own errors about files are no OSError
