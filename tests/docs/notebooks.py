"""Run the notebooks in docs/tutorials, each in a folder of its own and in a kernel of its own.

`python -m tests.docs.notebooks [NAME ...]` (`make notebooks`) stores their current output, and the report that each of
them leaves as a page of docs/gallery.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from tests.docs.documented import DOCS

TUTORIALS, GALLERY = DOCS / "tutorials", DOCS / "gallery"
NOTEBOOKS = sorted(TUTORIALS.glob("*.ipynb"))
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
# Lines about the progress of a training, which appear if it is slow, and about time and memory of a dry run.
PASSING = re.compile(r"^(step \d+ of \d+, .* left|(time|memory) +about .*)\n", re.MULTILINE)


def run(path: Path, folder: Path) -> Any:
    """The notebook with its current output, without anything that depends on the machine or the time."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=600, kernel_name="python3", record_timing=False, resources={"metadata": {"path": str(folder)}}
    )
    client.execute(env={**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"})
    notebook.metadata = nbformat.from_dict(METADATA)
    for number, cell in enumerate(notebook.cells, 1):
        cell.id, cell.metadata = f"cell-{number}", nbformat.from_dict({})
        if cell.cell_type == "code" and (text := printed(cell)):
            cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=text)]
    return notebook


def printed(cell: Any) -> str:
    """The output of a cell, which is text. Standard error is left out, so that it holds no result."""
    for output in cell.outputs:
        assert output.output_type == "stream", f"print the result of the cell: {cell.source}"
    return PASSING.sub("", "".join(output.text for output in cell.outputs if output.name == "stdout"))


def main(names: list[str]) -> None:
    """Store outputs and reports."""
    for path in NOTEBOOKS:
        if names and path.stem not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(run(path, Path(folder)), path)
            (report,) = Path(folder).glob("runs/*/report.html")
            (GALLERY / f"{path.stem}.html").write_text(report.read_text())
        print(path.relative_to(DOCS))


if __name__ == "__main__":
    main(sys.argv[1:])
