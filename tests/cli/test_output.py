"""Where the output of the commands goes."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from clipwise.cli.output import is_live


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("screen", "is_notebook", "live"),
    [(Terminal, False, True), (Terminal, True, False), (io.StringIO, False, False), (io.StringIO, True, False)],
)
def test_lines_are_overwritten_on_terminals_only(
    screen: type[io.StringIO], is_notebook: bool, live: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Notebooks set FORCE_COLOR, so that rich takes every stream for a terminal."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    if is_notebook:
        monkeypatch.setenv("JPY_PARENT_PID", "1")
    assert is_live(Console(file=screen())) == live
