"""The front end of `python -m experiments` and `python -m benchmarks`: a command name, then its options."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

from clipwise.errors import ClipwiseError
from clipwise.validation.arguments import one_of

Main = Callable[[Sequence[str]], object]


@dataclass(frozen=True)
class Command:
    """A module with `main(arguments)`, and its help line."""

    module: str
    line: str

    def main(self, arguments: Sequence[str]) -> object:
        """Import the module and run it."""
        return import_module(self.module).main(arguments)


def dispatch(program: str, about: str, commands: Mapping[str, tuple[str, Main]], arguments: Sequence[str]) -> int:
    """Run the command that the first argument names; returns the exit code.

    Args:
        program: `python -m ...`.
        commands: from a name to its help line and main function, which may return an exit code.
        arguments: the name and the options of that command.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        widest = max(map(len, commands))
        lines = [f"  {name:<{widest}}  {line}" for name, (line, _) in commands.items()]
        print("\n".join([f"usage: {program} NAME [options]", "", about, "", *lines]))
        print(f"\n{program} NAME --help lists the options of a command.")
        return 0
    name, *rest = arguments
    try:
        one_of("name", name, commands)
        code = commands[name][1](rest)
    except ClipwiseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return code if isinstance(code, int) else 0


def parser_of(program: str, about: str | None) -> argparse.ArgumentParser:
    """The parser of a command. `about` is the docstring of its module."""
    return argparse.ArgumentParser(
        prog=program, description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
