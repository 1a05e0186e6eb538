"""The outcome of one use of the API."""

from __future__ import annotations

import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from clipwise import ClipwiseError
from tests.api_fuzz.values import Choice

TOO_LONG = 30  # seconds; a case takes a few milliseconds


class WrongAnswerError(AssertionError):
    """A call returned a wrong result."""


class HangError(BaseException):
    """A call did not return."""


@dataclass
class Outcome:
    """One case and its result.

    Args:
        game: the part of the API.
        seed: determines the case.
        problem: the error found, or "".
        refusals: clipwise errors by type.
        accepted: invalid arguments that were accepted.
    """

    game: str
    seed: int
    problem: str = ""
    refusals: list[str] = field(default_factory=list)
    accepted: dict[str, Any] = field(default_factory=dict)


def played(game: str, seed: int, play: Callable[[Choice], list[str]], choice: Choice) -> Outcome:
    """Run a case. Every exception is a finding, except for a refusal that names the cause."""
    outcome = Outcome(game, seed)
    try:
        with _limited(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcome.refusals = play(choice)
            outcome.accepted = choice.spoiled
    except ClipwiseError as refusal:
        outcome.refusals = [type(refusal).__name__]
        outcome.problem = unnamed(refusal, choice)
    except HangError:
        outcome.problem = "it did not come back"
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)
        ours = [f"{f.filename.rpartition('/')[2]}:{f.lineno}" for f in where if "/src/clipwise/" in f.filename]
        outcome.problem = f"{type(error).__name__}: {error} ({' '.join(ours[-2:])}; spoiled {choice.spoiled})"
    return outcome


def unnamed(refusal: ClipwiseError, choice: Choice) -> str:
    """A refusal must name an argument: the invalid one, or one that conflicts with others."""
    text = str(refusal)
    if len(text) < 20:
        return f"a message that explains nothing: {text!r}"
    if not any(name in text for name in (*choice.spoiled, *choice.given)):
        return f"the message does not name the argument ({choice.spoiled}): {text}"
    return ""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise WrongAnswerError(what)


@contextmanager
def _limited() -> Iterator[None]:
    def late(*_: object) -> None:
        raise HangError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(TOO_LONG)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
