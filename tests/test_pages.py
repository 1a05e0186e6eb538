"""Examples of the pages on clipping and normalization run, and README.md names and links all there is."""

from __future__ import annotations

import contextlib
import inspect
import re
from pathlib import Path

import pytest
import torch

from benchmarks.methods import AUTO, COMPILED
from benchmarks.peers.rows import rows_for
from clipwise.clipping import Strategy, __all__, backprop, batch, lipschitz, per_example
from clipwise.errors import ConfigurationError
from experiments import models
from tests.documented import rerun

FOLDER = Path(__file__).parent.parent
README = (FOLDER / "README.md").read_text()
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


@pytest.mark.parametrize("page", ["clipping.md", "normalization.md"])
def test_every_example_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (FOLDER / "docs" / page).read_text()
    monkeypatch.chdir(tmp_path)
    blocks = list(rerun(text))
    assert blocks
    assert all(old == new for old, new in blocks)


def test_the_table_of_strategies_names_each_of_them() -> None:
    found = {
        name
        for module in (backprop, batch, lipschitz, per_example)
        for name, value in vars(module).items()
        if name in __all__
        and isinstance(value, type)
        and issubclass(value, Strategy)
        and value is not Strategy
    }
    rows = [line for line in README.splitlines() if line.startswith("|")]
    assert found == {"PerExample", "Batch", "Lipschitz", "Backprop"}
    for name in (*found, "replace_batchnorm"):
        assert any(f"{name}(" in row and "](docs/" in row for row in rows), name


def test_every_page_is_linked_and_every_link_leads_somewhere() -> None:
    for page in (FOLDER / "docs").glob("*.md"):
        assert f"](docs/{page.name})" in README, page.name
    for page in (FOLDER / "README.md", *(FOLDER / "docs").glob("*.md")):
        for target in LINK.findall(page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_table_of_models_is_true() -> None:
    text = (FOLDER / "docs" / "normalization.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\| ([^|]*) \| ([^|]*) \|$", text, re.MULTILINE)
    normalized = [name for name in models.names() if "batch" in _norms_of(name)]
    assert sorted(name for name, *_ in rows) == sorted(normalized)
    for name, size, default in rows:
        signature = inspect.signature(getattr(models, name)).parameters
        assert signature["norm"].default == {"no norm": "none"}.get(default, default)
        options = {"width": 8} if "width" in signature else {}
        is_text = size == "ids of words"
        x = torch.ones(2, 5, dtype=torch.int64) if is_text else torch.randn(2, *map(int, size.split(" x ")))
        assert len(models.build(name, **options).eval()(x)) == 2


def _norms_of(name: str) -> set[str]:
    """Which norms a model may have."""
    found = set()
    for norm in models.NORMS:
        with contextlib.suppress(ConfigurationError, TypeError):
            models.build(name, norm=norm)
            found.add(norm)
    return found


def test_profiles_are_made_by_commands_that_run() -> None:
    """`--row`, which must be a row of that device, and `--out` are required."""
    text = (FOLDER / "docs" / "performance.md").read_text()
    commands = re.findall(r"python -m benchmarks breakdown (.*)", text)
    assert len(commands) == 4
    for command in commands:
        words = command.split()
        options = list(zip(words[::2], words[1::2], strict=True))
        named = dict(options)
        assert set(named) == {"--device", "--method", "--row", "--out"} and named["--out"].endswith(".md")
        assert named["--method"] in (AUTO, COMPILED, "reweight")
        wanted = [value for option, value in options if option == "--row"]
        assert len(rows_for(named["--device"], wanted=wanted)) == len(wanted)
