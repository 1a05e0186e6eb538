"""What a user chooses for `clipwise train`: by flags, or by a configuration file, which a run also writes.

A file has the sections of a run's config.toml, so that file can be used again. What a run only records there, such as
its noise, is skipped when the file is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from fractions import Fraction
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from clipwise.errors import ConfigurationError
from clipwise.recipes import toml
from clipwise.recipes.kind import Settings

PRESETS = ("fast", "best")
OPTIMIZERS = ("sgd", "adam", "adamw")
DEVICES = ("auto", "cpu", "cuda")
KINDS = ("table", "images", "text", "function", "digits")
MOST_EPOCHS = 1e6
_NAMES = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}


@dataclass(frozen=True)
class Choices:
    """The choices of a user. None leaves the choice to the defaults.

    Args:
        path: the data: a file, a folder, the name of a data set, or `module:function`.
        target: the column to predict.
        text: the column with the text.
        labels: the values of the target; not released then.
        schema: a schema file, which declares ranges and categories.
        task: "classification" or "regression", for a table; by default from noised counts.
        encoding: of text in files; by default UTF-8.
        balanced: weight each class of a table by the inverse of its frequency.
        image_size: the side of square images, in pixels; by default 32 for image files, and that of arrays, at most 64.
        grey: drop the colours of images.
        data_kind: "table", "images", "text" or "function"; by default from the path.
        data_folder: the folder of data sets that are given by name.
        epsilon: the budget; infinity for no privacy.
        delta: the delta of the guarantee.
        counts_share: the share of the budget for noised counts.
        preset: "fast" or "best".
        model, batch_size, epochs, learning_rate, optimizer, momentum, weight_decay, max_norm, ema, views: as in
            `Settings`.
        hold_out: the share of the rows that are held out for evaluation.
        public_test: a file of public rows for evaluation.
        groups: a column; the accuracy is also released for each of its categories.
        public_reference: the folder of a run without privacy, whose data the user declares public.
        seed: makes the run reproducible; it then claims no guarantee.
        device: "auto", "cpu" or "cuda".
    """

    path: str = ""
    target: str | None = None
    text: str | None = None
    labels: tuple[str, ...] | None = None
    schema: str | None = None
    task: str | None = None
    encoding: str | None = None
    balanced: bool = False
    image_size: int | None = None
    grey: bool | None = None
    data_kind: str | None = None
    data_folder: str | None = None
    epsilon: float | None = None
    delta: float | None = None
    counts_share: float | None = None
    preset: str = "fast"
    model: str | None = None
    batch_size: int | None = None
    epochs: float | None = None
    learning_rate: float | None = None
    optimizer: str | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    max_norm: float | None = None
    ema: float | None = None
    views: int | None = None
    hold_out: float = 0.1
    public_test: str | None = None
    groups: str | None = None
    public_reference: str | None = None
    seed: int | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(Choices).items():
            _require_type(flag(name), getattr(self, name), get_args(kind) or (kind,))
        _one_of("--preset", self.preset, PRESETS)
        _one_of("--optimizer", self.optimizer, OPTIMIZERS)
        _one_of("--device", self.device, DEVICES)
        _one_of("--kind", self.data_kind, KINDS)
        _one_of("--task", self.task, ("classification", "regression"))
        if self.epsilon is not None and not self.epsilon > 0:
            raise ConfigurationError(f"--epsilon must be a positive number, or none, not {self.epsilon:g}.")
        if self.delta is not None and not 0 < self.delta < 1:
            raise ConfigurationError(f"--delta must lie between 0 and 1, not {self.delta:g}.")
        if not 0 <= self.hold_out <= 0.5:
            raise ConfigurationError(f"--hold-out must lie between 0 and 0.5, not {self.hold_out:g}.")
        if self.counts_share is not None and not 0 <= self.counts_share < 1:
            raise ConfigurationError(f"counts_share must be at least 0 and below 1, not {self.counts_share:g}.")
        if self.image_size is not None and not 1 <= self.image_size <= 1024:
            raise ConfigurationError(f"--image-size must lie between 1 and 1024 pixels, not {self.image_size}.")
        for name in ("batch_size", "epochs", "learning_rate", "max_norm", "views"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ConfigurationError(f"{flag(name)} must be a positive number, not {value:g}.")
        for name, most in (("ema", 1), ("momentum", 1), ("weight_decay", math.inf), ("seed", 2**63)):
            value = getattr(self, name)
            if value is not None and not 0 <= value < most:
                limit = "" if most == math.inf else f" and below {most:g}"
                raise ConfigurationError(f"{flag(name)} must be at least 0{limit}, not {value:g}.")
        if self.epochs is not None and self.epochs > MOST_EPOCHS:
            raise ConfigurationError(f"--epochs must be at most {MOST_EPOCHS:g}, not {self.epochs:g}.")

    @property
    def is_private(self) -> bool:
        """Whether the run trains under differential privacy."""
        return self.epsilon is None or math.isfinite(self.epsilon)

    @property
    def held_out_share(self) -> Fraction:
        """The share of held-out rows as a fraction with a small denominator."""
        return Fraction(self.hold_out).limit_denominator(1000)

    def settings(self, defaults: Settings) -> Settings:
        """The settings of the run: the defaults, with what the user chose."""
        given = {f.name: getattr(self, f.name) for f in fields(Settings)}
        return replace(defaults, **{name: value for name, value in given.items() if value is not None})

    def sections(self) -> dict[str, dict[str, Any]]:
        """The choices as tables of a configuration file."""
        values = asdict(self)
        values["epsilon"] = values["epsilon"] if self.epsilon is None or math.isfinite(self.epsilon) else "none"
        return {
            section: {key: values[name] for key, name in keys.items() if values[name] is not None}
            for section, keys in SECTIONS.items()
        }


# The keys of a configuration file, and the fields of `Choices` that they give.
_TABLE = ("target", "text", "labels", "schema", "task", "encoding", "balanced")
_DATA = ("path", *_TABLE, "image_size", "grey", "data_folder")
_TRAINING = ("preset", *(f.name for f in fields(Settings) if f.name != "counts_share"))
SECTIONS: Mapping[str, Mapping[str, str]] = {
    "run": {name: name for name in ("seed", "device")},
    "data": {name: name for name in _DATA} | {"kind": "data_kind"},
    "privacy": {name: name for name in ("epsilon", "delta", "counts_share")},
    "training": {name: name for name in _TRAINING},
    "evaluation": {name: name for name in ("hold_out", "public_test", "groups", "public_reference")},
}
# What a run writes beside its choices.
RECORDED: Mapping[str, tuple[str, ...]] = {
    "run": ("name", "command", "created"),
    "data": ("rows", "description", "preprocessing"),
    "privacy": ("adjacency", "unit"),
    "training": ("steps", "noise_multiplier", "counts_noise_multiplier", "parameters"),
    "evaluation": ("rows", "noise_multiplier", "released"),
}
RECORDED_SECTIONS = ("encoding", "versions", "public_reference")


def read_choices(path: Path) -> dict[str, Any]:
    """The fields of `Choices` that a configuration file gives. A key that is not known is an error."""
    found: dict[str, Any] = {}
    for section, table in toml.read(path).items():
        if section in RECORDED_SECTIONS:
            continue
        if section not in SECTIONS or not isinstance(table, Mapping):
            raise ConfigurationError(
                f"{path}: [{section}] is not known. The sections are {', '.join(f'[{name}]' for name in SECTIONS)}."
            )
        for key, value in table.items():
            if key in SECTIONS[section]:
                found[SECTIONS[section][key]] = tuple(value) if isinstance(value, list) else value
            elif key not in RECORDED[section]:
                known = ", ".join(SECTIONS[section])
                raise ConfigurationError(f"{path}: {key!r} in [{section}] is not known. Its keys are {known}.")
    if found.get("epsilon") == "none":
        found["epsilon"] = math.inf
    return found


def choices_of(given: Mapping[str, Any], config: Path | None) -> Choices:
    """The choices of the flags that are given (not None), then of the configuration file, then the defaults."""
    found = {} if config is None else read_choices(config)
    found |= {name: value for name, value in given.items() if value is not None}
    return Choices(**found)


def _require_type(what: str, value: Any, kinds: tuple[Any, ...]) -> None:
    """Raise for a value of a configuration file that has another type."""
    if value is None or type(value) in kinds or (float in kinds and type(value) is int):
        return
    is_list = isinstance(value, tuple) and all(isinstance(each, str) for each in value)
    if is_list and any(get_origin(kind) is tuple for kind in kinds):
        return
    names = " or ".join(_NAMES.get(kind, "a list of texts") for kind in kinds if kind is not NoneType)
    raise ConfigurationError(f"{what} must be {names}.")


def _one_of(flag: str, value: str | None, known: tuple[str, ...]) -> None:
    if value is not None and value not in known:
        raise ConfigurationError(f"{flag} {value!r} is not known: use {', '.join(known)}.")


def flag(name: str) -> str:
    """How the command line calls a field of `Choices`, or another option."""
    if name in ("counts_share", "momentum", "weight_decay"):  # only in a configuration file
        return name
    if name == "path":
        return "DATA"
    return "--" + {"views": "augmentation", "data_kind": "kind"}.get(name, name).replace("_", "-")
