"""The documentation site builds, has every page and every public name, and has no broken links."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import clipwise
from tests.docs.documented import DOCS, PAGES

ROOT = DOCS.parent
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")
ENTRY = re.compile(r"^::: (\S+)", re.MULTILINE)
NOTEBOOKS = sorted((DOCS / "tutorials").glob("*.ipynb"))
OTHERS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "README.md",
    *ROOT.glob("experiments/*/README.md"),
]
needs_mkdocs = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("mkdocs", "material", "mkdocstrings"))), reason="mkdocs is missing"
)


@needs_mkdocs
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "site" / "quickstart" / "index.html").is_file()
    tutorial = (tmp_path / "site" / "tutorials" / "tables" / "index.html").read_text()
    assert "language-bash" in tutorial and "language-text" in tutorial and "schema.toml" in tutorial
    assert 'href="../../guides/train/"' in tutorial and 'href="../tables.ipynb"' in tutorial
    assert 'href="../tutorials/tables/"' in (tmp_path / "site" / "gallery" / "index.html").read_text()
    for page in (tmp_path / "site" / "reference").rglob("*.html"):  # docs/public_names.py keeps these out
        assert "doc-symbol-module" not in page.read_text(), page


def test_every_page_is_in_the_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("\n\n")[0]
    listed = re.findall(r"([\w/-]+\.md)$", nav, re.MULTILINE)
    assert len(listed) == len(set(listed))
    notebooks = {path.relative_to(DOCS).with_suffix(".md").as_posix() for path in NOTEBOOKS}
    assert set(listed) == {page.relative_to(DOCS).as_posix() for page in PAGES} | notebooks | {"contributing.md"}


def test_the_reference_has_every_public_name() -> None:
    entries = {entry for page in (DOCS / "reference").glob("*.md") for entry in ENTRY.findall(page.read_text())}
    for name in clipwise.__all__:
        value = getattr(clipwise, name)
        if not hasattr(value, "__path__") and not hasattr(value, "__file__"):
            assert f"clipwise.{name}" in entries, name
        else:
            public = getattr(value, "__all__", ("Crop", "Flip", "Views"))
            assert {f"clipwise.{name}.{inner}" for inner in public} <= entries, name


@pytest.mark.parametrize("page", [*PAGES, *OTHERS, *NOTEBOOKS], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(page: Path) -> None:
    broken = [
        target
        for target in LINK.findall(page.read_text())
        if not (page.parent / target).exists() and (page.parent / target).resolve() != DOCS / "contributing.md"
    ]
    assert not broken
