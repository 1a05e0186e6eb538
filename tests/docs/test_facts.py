"""Tables and commands in the documentation agree with the repository."""

from __future__ import annotations

import contextlib
import inspect
import re
import shlex
from pathlib import Path

import pytest
import torch
import typer

from benchmarks.methods import AUTO, COMPILED
from benchmarks.peers.rows import rows_for
from clipwise.cli.app import app
from clipwise.clipping import Strategy, __all__, backprop, batch, lipschitz, per_example
from clipwise.errors import ConfigurationError
from clipwise.recipes.tables.schema import read_schema
from experiments import models
from tests.docs.documented import DOCS, PAGES, README


@pytest.mark.parametrize("page", [DOCS.parent / "README.md", DOCS / "guides" / "strategy.md"])
def test_the_table_of_strategies_names_each_of_them(page: Path) -> None:
    found = {
        name
        for module in (backprop, batch, lipschitz, per_example)
        for name, value in vars(module).items()
        if name in __all__ and isinstance(value, type) and issubclass(value, Strategy) and value is not Strategy
    }
    rows = [line for line in page.read_text().splitlines() if line.startswith("|")]
    assert found == {"PerExample", "Batch", "Lipschitz", "Backprop"}
    for name in (*found, "replace_batchnorm"):
        assert any(f"{name}(" in row and "](" in row for row in rows), name


def test_the_table_of_models_is_true() -> None:
    text = (DOCS / "papers" / "normalization.md").read_text()
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
    """The supported norms of a model."""
    found = set()
    for norm in models.NORMS:
        with contextlib.suppress(ConfigurationError, TypeError):
            models.build(name, norm=norm)
            found.add(norm)
    return found


def _blocks(page: Path) -> list[tuple[str, str]]:
    """Language and text of the code blocks of a page; those that are indented have no language."""
    text = page.read_text()
    fenced = re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [*fenced, *(("", line) for line in re.findall(r"^    (.*)", text, re.MULTILINE))]


def test_schemas_are_accepted(tmp_path: Path) -> None:
    schemas = [block for page in PAGES for name, block in _blocks(page) if name == "toml"]
    assert schemas
    for schema in schemas:
        (tmp_path / "schema.toml").write_text(schema)
        read_schema(tmp_path / "schema.toml")


def test_commands_exist_with_their_options() -> None:
    """The `clipwise` commands in blocks that are not run."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    blocks = [block for page in (*PAGES, README) for name, block in _blocks(page) if name in ("", "bash")]
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("clipwise ")]
    assert len(lines) > 50
    for line in lines:
        _, name, *words = shlex.split(line, comments=True)
        known = {option for parameter in commands[name].params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known, line


def test_profiles_are_made_by_commands_that_run() -> None:
    """`--row`, which must be a row of that device, and `--out` are required."""
    text = (DOCS / "concepts" / "cost.md").read_text()
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


def test_the_accuracies_of_strategies_are_those_of_the_experiment() -> None:
    text = (DOCS / "guides" / "strategy.md").read_text().partition("## What we measured")[2].partition("\n## ")[0]
    rows = [line.split(" | ", 1)[1] for line in text.splitlines() if "±" in line and line.startswith("|")]
    results = (DOCS.parent / "experiments" / "batch_clipping" / "results" / "results.md").read_text()
    assert len(rows) == 5 and all(f"| {row}\n" in results for row in rows)
