"""The examples of a page: run them in order, and compare what they print with what the page says.

`python -m tests.documented` writes docs/accounting.md again, with what the examples print now.

A `console` block is a command after "$ " and its output. A `python` block is run as it is; a `text` block right
after it is its output. All of them share one folder, and the Python blocks their names.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from clipwise.cli.app import app

PAGE = Path(__file__).parent.parent / "docs" / "accounting.md"
BLOCK = re.compile(r"```(console|python|text)\n(.*?)```\n", re.DOTALL)


def rerun(text: str) -> Iterator[tuple[str, str]]:
    """Each block as the page has it, and as it would be written now."""
    names: dict[str, Any] = {}
    printed = ""
    for block in BLOCK.finditer(text):
        kind, content = block.groups()
        if kind == "console":
            command = re.match(r"\$ clipwise ((?:.*\\\n)*.*)\n", content)
            assert command, content
            result = CliRunner().invoke(app, shlex.split(command[1]), env={"COLUMNS": "100"})
            assert result.exit_code == 0, f"{command[0]}{result.output}"
            fresh = command[0] + result.stdout
        elif kind == "python":
            output = io.StringIO()
            with redirect_stdout(output):
                exec(compile(content, f"{PAGE.name}, a python block", "exec"), names)
            printed, fresh = output.getvalue(), content
        else:
            fresh = printed
        yield block[0], f"```{kind}\n{_without_ids(fresh)}```\n"


def _without_ids(text: str) -> str:
    """The id of a run is random."""
    return re.sub(r"\b[0-9a-f]{32}\b", "0123456789abcdef0123456789abcdef", text)


def main() -> None:
    text = PAGE.read_text()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for old, new in rerun(text):
            text = text.replace(old, new, 1)
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
