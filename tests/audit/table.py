"""Writes the table of planted bugs into docs/concepts/audit.md: `python -m tests.audit.table`.

Each tool runs with and without each planted bug.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.audit.bug import TOOLS, Bug
from tests.audit.bugs import BUGS

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "audit.md"
PLACE = re.compile(r"(<!-- bugs -->\n).*?(<!-- end of bugs -->)", re.DOTALL)
HEAD = "| planted bug | " + " | ".join(TOOLS) + " |\n|---" + "|---" * len(TOOLS) + "|\n"


def row(bug: Bug, caught: dict[str, bool | None]) -> str:
    """One line of the table."""
    words = {True: "caught", False: "-", None: ""}
    return f"| {bug.name} | " + " | ".join(words[caught[tool]] for tool in TOOLS) + " |\n"


def main() -> None:
    """Run all tools on all bugs and write the table."""
    lines = []
    for bug in BUGS.values():
        caught = {tool: bug.is_caught(tool) for tool in TOOLS}
        cries = [tool for tool in TOOLS if bug.is_caught(tool, planted=False)]
        if cries:
            raise SystemExit(f"{bug.name}: {', '.join(cries)} found something where nothing is planted.")
        lines.append(row(bug, caught))
    text = PLACE.sub(lambda place: place[1] + HEAD + "".join(lines) + place[2], PAGE.read_text())
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
