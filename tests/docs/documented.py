"""Run the code blocks of the pages in docs/ in order, and compare their output with the page.

`python -m tests.docs.documented [PAGE ...]` rewrites the pages with the current output.

- `console`: a command after "$ " and its output.
- `python`: is run. With `title="NAME.py"` it is saved as that file instead. A `text` block right after it is
  its output.
- `bash` and other `text` blocks are not run.

The blocks of a page share one folder, and the Python blocks their names. The README names a model, an optimizer and a
data set of the reader: `given()` supplies them. Numbers may differ by 0.5%, those on a line with the word "accuracy" by
15%: training is not seeded.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner

from clipwise.cli.app import app

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
README = DOCS.parent / "README.md"
BLOCK = re.compile(r"^```(console|python|text)([^\n]*)\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
TITLE = re.compile(r'title="([\w.]+)"')
# Attacks that train many models: the tests run fewer of them.
FEWER = {"runs=100)": "runs=2)", "models=16)": "models=6)", "canaries=500)": "canaries=50)"}


def given() -> dict[str, Any]:
    """What the README leaves to the reader."""
    model = torch.nn.Linear(8, 2)
    dataset = torch.utils.data.TensorDataset(torch.randn(2000, 8), torch.randint(0, 2, (2000,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"F": torch.nn.functional, "model": model, "optimizer": optimizer, "dataset": dataset}


def rerun(text: str, *, in_full: bool = True, names: dict[str, Any] | None = None) -> Iterator[tuple[str, str]]:
    """Yield each block as in the page, and with its current output. Python blocks see `names`."""
    names = {} if names is None else names
    printed, end = "", 0
    for block in BLOCK.finditer(text):
        kind, options, content = block.groups()
        fresh = content
        if kind == "console":
            fresh = _console(content)
        elif kind == "python" and (title := TITLE.search(options)):
            Path(title[1]).write_text(content)
        elif kind == "python" and "opacus" in content and find_spec("opacus") is None:
            end = 0
        elif kind == "python":
            printed, end = _python(content, names, in_full), block.end()
        elif end and not text[end : block.start()].strip():
            fresh = printed
        yield block[0], f"```{kind}{options}\n{_without_ids(fresh)}```\n"


def _console(content: str) -> str:
    command = re.match(r"\$ clipwise ((?:.*\\\n)*.*)\n", content)
    assert command, content
    result = CliRunner().invoke(app, shlex.split(command[1]), env={"COLUMNS": "100"})
    assert result.exit_code == 0, f"{command[0]}{result.output}"
    return command[0] + result.stdout


def _python(content: str, names: dict[str, Any], in_full: bool) -> str:
    for many, few in FEWER.items() if not in_full else ():
        content = content.replace(many, few)
    output = io.StringIO()
    with redirect_stdout(output):
        exec(compile(content, "a python block", "exec"), names)
    return output.getvalue()


def _without_ids(text: str) -> str:
    """Remove the random id of a run."""
    return re.sub(r"\b[0-9a-f]{32}\b", "0123456789abcdef0123456789abcdef", text)


def main(pages: list[Path]) -> None:
    """Rewrite the pages."""
    sys.path.insert(0, "")
    for page in pages:
        text = page.read_text()
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            for old, new in rerun(text):
                text = text.replace(old, new, 1)
            os.chdir("/")
        page.write_text(text)


if __name__ == "__main__":
    main([Path(name).resolve() for name in sys.argv[1:]] or PAGES)
