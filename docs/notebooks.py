"""MkDocs hook: each notebook of docs/tutorials becomes a page, with its stored output. Nothing is run.

Code cells become code blocks, and their output text blocks. `%%bash` and `%%writefile NAME` at the head of a cell
become the language and the title of its block. The notebook itself stays in the site, to be downloaded.
"""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from typing import Any

from mkdocs.structure.files import File

LANGUAGES = {".py": "python", ".toml": "toml"}


def on_files(files: Any, config: Any) -> Any:
    """Add a page for each notebook."""
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        path = PurePosixPath(file.src_uri)
        title, _, text = page(json.loads(file.content_string)).partition("\n")
        download = f"*This page is a notebook: [download it]({path.name}).*"
        files.append(File.generated(config, str(path.with_suffix(".md")), content=f"{title}\n\n{download}\n{text}"))
    return files


def page(notebook: dict[str, Any]) -> str:
    """A notebook as Markdown."""
    blocks = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            blocks.append(source)
            continue
        blocks.append(_code(source))
        for output in cell["outputs"]:
            if text := "".join(output["text"]).rstrip("\n"):
                blocks.append(f"```text\n{text}\n```")
    return "\n\n".join(blocks) + "\n"


def _code(source: str) -> str:
    magic, _, rest = source.partition("\n")
    if magic == "%%bash":
        return f"```bash\n{rest}\n```"
    if magic.startswith("%%writefile "):
        name = magic.split()[1]
        return f'```{LANGUAGES[PurePosixPath(name).suffix]} title="{name}"\n{rest}\n```'
    return f"```python\n{source}\n```"
