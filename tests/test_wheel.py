"""The wheel holds only the library: no experiments, benchmarks or tests, and no import of them."""

import ast
from pathlib import Path

import pytest
from setuptools import find_packages

SRC = Path(__file__).parent.parent / "src"
MODULES = sorted(SRC.rglob("*.py"))
OUTSIDE = {"experiments", "benchmarks", "tests", "examples"}


def test_every_package_of_the_wheel_is_clipwise():
    packages = find_packages(str(SRC))
    assert "clipwise.engine" in packages
    assert {package.partition(".")[0] for package in packages} == {"clipwise"}


def test_every_folder_with_modules_is_in_the_wheel():
    packages = set(find_packages(str(SRC)))
    assert {".".join(m.parent.relative_to(SRC).parts) for m in MODULES} == packages


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.relative_to(SRC).as_posix())
def test_no_module_imports_what_is_outside_the_wheel(module):
    for node in ast.walk(ast.parse(module.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        assert not {name.partition(".")[0] for name in names} & OUTSIDE, f"line {node.lineno}"


def test_what_has_moved_out_stays_out():
    gone = {"reproduce", "bench", "models", "data"}
    assert not gone & {path.stem for path in (SRC / "clipwise").iterdir()}


@pytest.mark.parametrize("example", sorted((SRC.parent / "examples").glob("*.py")), ids=lambda path: path.name)
def test_an_example_needs_no_more_than_the_wheel(example):
    assert not any(f"import {name}" in example.read_text() or f"from {name}" in example.read_text() for name in OUTSIDE)
