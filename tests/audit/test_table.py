"""The page has the table of the registry."""

from tests.audit.bug import TOOLS
from tests.audit.bugs import BUGS
from tests.audit.table import PAGE, PLACE


def test_the_page_names_every_bug_and_the_tools_that_catch_it() -> None:
    found = PLACE.search(PAGE.read_text())
    assert found
    rows = [[cell.strip() for cell in line.strip(" |").split("|")] for line in found[0].splitlines() if " | " in line]
    table = {name: dict(zip(TOOLS, cells, strict=False)) for name, *cells in rows[1:]}
    assert list(table) == [bug.name for bug in BUGS.values()]
    for bug in BUGS.values():
        assert {tool for tool in TOOLS if table[bug.name].get(tool) == "caught"} >= set(bug.caught_by)
