"""The two files that a run writes for a later process: the checkpoint and the resume file.

A *checkpoint* may be published: optimizer, accountant, configuration, position, in plain types. The *resume file* holds
the secrets of the next step. It has mode 0600, is written on a clean end and is deleted as soon as it is read: the same
noise on two different sums would reveal their difference, so no secret may be used twice.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from secrets import token_hex
from typing import IO, Any

import torch

from clipwise.errors import CheckpointError
from clipwise.ledger.durable_files import replace_file, sync_folder
from clipwise.privacy import Entry, Event
from clipwise.validation.arguments import plain, require_path

FORMAT = 2  # 2: digests of the weights, and declared updates
_KINDS = {
    "run": str,
    "position": int,
    "slot": int,
    "fingerprint": str,
    "seeded": bool,
    "configuration": Mapping,
    "optimizer": Mapping,
    "weights": Mapping,
    "declared": list,
}
_NEWER = {"tag", "made", "exact", "plan"}  # older checkpoints have none of these
_FIELDS = {*_KINDS, "history"}


def save(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Write a checkpoint so that a crash leaves the old file or the new one, never half of one."""
    require_path("path", path)
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"A checkpoint holds a state_dict, not a {type(state).__name__}: give private.state_dict(), or a "
            "mapping such as {'private': private.state_dict(), 'model': model.state_dict()}."
        )
    _replace(Path(path), lambda file: torch.save(dict(plain(state)), file), mode=0o644)


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a checkpoint with `weights_only=True`: plain types and tensors, no code."""
    try:
        state = torch.load(path, weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: the checkpoint does not exist.") from error
    except Exception as error:
        raise CheckpointError(f"{path} is no checkpoint, or it is damaged: {type(error).__name__}.") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} is no checkpoint of clipwise.")
    return state


def history_of(state: Mapping[str, Any]) -> list[Entry]:
    """The releases of a checkpoint's run. Raises if `state` is not a complete checkpoint."""
    stated = state.get("format") if isinstance(state, Mapping) else None
    if not isinstance(stated, int) or stated != FORMAT:
        raise CheckpointError("This is no state_dict of a private run, or one of another format.")
    try:
        history = [
            Entry(Event.from_dict(e["event"]), int(e["count"]), str(e.get("run", state["run"])))
            for e in state["history"]
        ]
        complete = state.keys() >= _FIELDS and sum(e.count for e in history) == state["position"]
        complete = complete and all(isinstance(state[name], kind) for name, kind in _KINDS.items())
        complete = complete and state["optimizer"].keys() >= {"state", "param_groups"}
        complete = complete and len(state.keys() & _NEWER) in (0, len(_NEWER))
        complete = complete and type(state.get("made", 0)) is int and isinstance(state.get("tag", ""), str)
        complete = complete and all(isinstance(value, int) for value in state["weights"].values())
        complete = complete and all(
            isinstance(text, str) for kind, reason in state["declared"] for text in (kind, reason)
        )
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError):  # also from tensors and arrays
        complete = False
    if not complete:
        raise CheckpointError("This state_dict of a private run is damaged: use the one saved before it.")
    return history


@dataclass(frozen=True)
class Secrets:
    """The secrets with which a run continues exactly where it stopped. They must not be shown or published."""

    run: str
    position: int
    fingerprint: str
    data: str
    model: str
    key: str
    epoch: str
    key_id: str = ""  # not in files of older versions

    def __repr__(self) -> str:
        return "Secrets(<secret>)"

    def is_of_same_run(self, other: Secrets) -> bool:
        """Whether run, position, configuration, data set and model are the same."""
        mine = self.run, self.position, self.fingerprint, self.data, self.model
        return mine == (other.run, other.position, other.fingerprint, other.data, other.model)


def write_secrets(path: Path, secrets: Secrets) -> None:
    """Write the resume file, readable only by its owner."""
    text = json.dumps(asdict(secrets)).encode()
    _replace(path, lambda file: file.write(text), mode=0o600)


def _replace(path: Path, write: Callable[[IO[bytes]], Any], mode: int) -> None:
    try:
        replace_file(path, write, mode)
    except (OSError, ValueError) as error:  # ValueError: a path that no file can have
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{path} cannot be written: {reason}. Give another path.") from error


def take_secrets(path: Path) -> Secrets | None:
    """Read the resume file and delete it, so that it cannot be used twice.

    Of several processes that try at the same time, only one can rename the file and so read it.
    """
    own = path.with_name(f"{path.name}.{token_hex(8)}")
    try:
        path.rename(own)
    except FileNotFoundError:
        return None
    try:
        text = own.read_bytes()
    finally:
        own.unlink()
        sync_folder(path.parent)
    try:
        return Secrets(**json.loads(text))
    except (ValueError, TypeError):
        return None
