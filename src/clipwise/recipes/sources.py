"""The kinds of data: which source reads the data of `clipwise train`, and which encoder a run's folder holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from clipwise.errors import ConfigurationError
from clipwise.recipes.config import Choices, flag
from clipwise.recipes.digits import EMBEDDED, DigitsEncoder, DigitsSource
from clipwise.recipes.functions import FunctionEncoder, FunctionSource
from clipwise.recipes.images.encoder import ImageEncoder
from clipwise.recipes.images.source import ImageSource
from clipwise.recipes.kind import Encoder, Source
from clipwise.recipes.tables.encoder import TableEncoder
from clipwise.recipes.tables.read import listed
from clipwise.recipes.tables.schema import read_schema
from clipwise.recipes.tables.source import TableSource
from clipwise.recipes.texts.encoder import TextEncoder
from clipwise.recipes.texts.source import TextSource

_ENCODERS: Mapping[str, type[Encoder]] = {
    "digits": DigitsEncoder,
    "function": FunctionEncoder,
    "images": ImageEncoder,
    "table": TableEncoder,
    "text": TextEncoder,
}

# What each kind of data needs to be opened; other options of this list are refused.
_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "digits": (),
    "function": (),
    "images": ("labels", "image_size", "grey"),
    "table": ("target", "labels", "schema", "task", "encoding", "balanced"),
    "text": ("text", "target", "labels", "encoding"),
}


def open_source(choices: Choices) -> Source:
    """Open the data that the user named. Nothing is learned from the content of a record."""
    kind = choices.data_kind or _kind_of(choices)
    for name in sorted({name for names in _OPTIONS.values() for name in names} - set(_OPTIONS[kind])):
        if getattr(choices, name) not in (None, False):
            raise ConfigurationError(f"{flag(name)} is not for data of the kind {kind!r}: leave it out.")
    if kind == "digits":
        if choices.path != EMBEDDED:
            raise ConfigurationError(f"--kind digits is for the data set {EMBEDDED!r} alone: leave --kind out.")
        return DigitsSource(train=True)
    if kind == "function":
        return FunctionSource(choices.path)
    path = path_of(choices)
    if kind == "images":
        return ImageSource(
            path, labels=choices.labels, image_size=choices.image_size, grey=choices.grey, model=choices.model
        )
    if kind == "text":
        columns = (choices.text, choices.target)
        return TextSource(path, *columns, labels=choices.labels, encoding=choices.encoding, model=choices.model)
    if choices.target is None and choices.schema is None:
        raise ConfigurationError("--target is needed: the name of the column to predict.")
    source = TableSource(
        path,
        choices.target,
        labels=choices.labels,
        task=choices.task,
        schema=None if choices.schema is None else read_schema(Path(choices.schema)),
        encoding=choices.encoding,
        balanced=choices.balanced,
    )
    if not source.has_target:
        raise ConfigurationError(_no_target(source))
    return source


def _no_target(source: TableSource) -> str:
    if source.schema.target is None:
        return "--target is needed: the name of the column to predict. The schema has no [target] either."
    columns = listed(source.table.columns)
    return f"--target {source.schema.target.name!r} is no column of {source.path}. Its columns are {columns}."


def path_of(choices: Choices) -> Path:
    """The path of the data: as given, or that of the data set with this name in the data folder."""
    path = Path(choices.path)
    if choices.data_folder is None:
        if not path.exists():
            raise ConfigurationError(
                f"{choices.path} does not exist. Give a file, a folder, module:function, or the name of a data set "
                "with --data-folder."
            )
        return path
    folder = Path(choices.data_folder)
    if not folder.is_dir():
        raise ConfigurationError(f"--data-folder {folder} is not a folder.")
    if (folder / path).exists():
        return folder / path
    found = sorted(folder.glob(f"{path.name}.*"))
    if len(found) != 1:
        what = f"{len(found)} files have this name" if found else "there is none"
        raise ConfigurationError(f"--data-folder {folder} holds no single data set {choices.path!r}: {what}.")
    return found[0]


def _kind_of(choices: Choices) -> str:
    if choices.path == EMBEDDED and choices.data_folder is None and not Path(EMBEDDED).exists():
        return "digits"
    if ":" in choices.path and not Path(choices.path).exists():
        return "function"
    path = path_of(choices)
    if choices.text is not None:
        return "text"
    if ImageSource.recognises(path):  # first: folders of images often have a read-me or a list of classes
        return "images"
    if TextSource.recognises(path):
        return "text"
    return "images" if path.is_dir() else "table"  # the error about such a folder names all formats


def require_public_test(choices: Choices, source: Source) -> None:
    """Raise for public test rows that are missing or have other columns, before anything is released."""
    found = choices.public_test
    if found is None:
        return
    if not source.has_figures:
        raise ConfigurationError(
            f"--public-test is not possible for data of the kind {source.kind!r}: test the model in your own code."
        )
    try:
        if isinstance(source, DigitsSource):
            DigitsSource(train=False, file=None if found == EMBEDDED else Path(found))
        elif not Path(found).exists():
            raise ConfigurationError("there is no such file or folder.")
        elif choices.is_private and Path(found).samefile(path_of(choices)) and not _may_have_parts(Path(found)):
            raise ConfigurationError(
                "these are the data of the run, whose rows are private: an exact figure on them is not covered by "
                "epsilon. Give other rows, or leave it out: a share of the rows is held out for a noised figure."
            )
        elif isinstance(source, TableSource):
            test = TableSource(Path(found), schema=source.schema, encoding=choices.encoding)
            if not test.has_target:
                raise ConfigurationError(_no_target(test))
        else:
            open_source(replace(choices, path=found, data_kind=source.kind, data_folder=None))
    except ConfigurationError as error:
        raise ConfigurationError(f"--public-test {found}: {error}") from error


def _may_have_parts(path: Path) -> bool:
    """Whether a path may hold public test records beside those of the training."""
    names = [entry.name.lower() for entry in path.iterdir()] if path.is_dir() else []
    return path.suffix == ".npz" or any(part in name for name in names for part in ("test", "t10k", "val"))


def public_test(choices: Choices, encoder: Encoder) -> Source | None:
    """The public test rows, if there are any."""
    if choices.public_test is None:
        return None
    return open_further(encoder, Path(choices.public_test), choices.encoding)


def open_further(encoder: Encoder, path: Path, encoding: str | None = None) -> Source:
    """Further data of the kind that the encoder is for. `encoding` is that of text in files; by default the run's."""
    if encoding is None:
        return encoder.open(path)
    if not isinstance(encoder, (TableEncoder, TextEncoder)):
        raise ConfigurationError(f"--encoding is not for data of the kind {encoder.kind!r}: leave it out.")
    return encoder.open(path, encoding)


def encoder_from(data: Mapping[str, Any]) -> Encoder:
    """The encoder of a run, from its config.toml."""
    if data.get("kind") not in _ENCODERS:
        raise ConfigurationError(f"[encoding] kind = {data.get('kind')!r} is not known: use the version that wrote it.")
    return _ENCODERS[data["kind"]].from_dict(data)
