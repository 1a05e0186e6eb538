"""MkDocs hooks: links that leave docs/, and CONTRIBUTING.md as a page.

Pages link to files of the repository by relative paths, which work on GitHub. On the site such a link leads to the
repository (`repo_url`) or, without an address, becomes the path of the file. An image is copied into the site. A
link to a notebook leads to its page. A list that follows a line of text gets the blank line that Python-Markdown needs.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")
LIST = re.compile(r"^(?![-*|#>\s]|\d+\. )(.+)\n(?=(?:-|1\.) )", re.MULTILINE)
CODE = re.compile(r"```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Add CONTRIBUTING.md, and the images outside docs/ that pages show."""
    contributing = _rewritten((ROOT / "CONTRIBUTING.md").read_text(), "CONTRIBUTING.md", config)
    files.append(File.generated(config, "contributing.md", content=contributing))
    for page in Path(config["docs_dir"]).rglob("*.md"):
        for is_image, _, target, _ in LINK.findall(page.read_text()):
            path = _in_repository(target, page.relative_to(ROOT).as_posix())
            if is_image and not path.startswith("docs/"):
                files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Let links out of docs/ lead to the repository, or name the file."""
    return _rewritten(markdown, f"docs/{page.file.src_uri}", config)


def _rewritten(text: str, source: str, config: Any) -> str:
    blocks = [match.span() for match in CODE.finditer(text)]

    def replace(link: re.Match[str]) -> str:
        if any(start <= link.start() and link.end() <= end for start, end in blocks):
            return link[0]
        is_image, label, target, anchor = link[1], link[2], link[3], link[4] or ""
        path = _in_repository(target, source)
        if path.startswith("docs/") and (ROOT / path).exists():
            if path.endswith(".ipynb") and Path(path).stem != Path(source).stem:  # else it is the download
                path = path.removesuffix(".ipynb") + ".md"
            goal = posixpath.relpath(path[5:], posixpath.dirname(source.removeprefix("docs/")) or ".")
        elif path == "CONTRIBUTING.md":
            goal = posixpath.relpath("contributing.md", posixpath.dirname(source.removeprefix("docs/")) or ".")
        elif path.startswith("docs/") and source.startswith("docs/"):
            return link[0]  # no such page: mkdocs reports it
        elif is_image:
            goal = posixpath.relpath(path, posixpath.dirname(source.removeprefix("docs/")) or ".")
        elif not config["repo_url"]:
            named = f"`{path}`"
            return named if Path(path).name in label else f"{label} ({named})"
        else:
            kind = "tree" if (ROOT / path).is_dir() else "blob"
            goal = f"{config['repo_url'].rstrip('/')}/{kind}/main/{path}"
        return f"{is_image}[{label}]({goal}{anchor})"

    return _with_lists(LINK.sub(replace, text))


def _with_lists(text: str) -> str:
    pieces = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(piece if piece.startswith("```") else LIST.sub(r"\1\n\n", piece) for piece in pieces)


def _in_repository(target: str, source: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target)).replace(os.sep, "/")
