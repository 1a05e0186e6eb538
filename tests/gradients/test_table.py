"""The page of operations matches the cases."""

import pytest

from tests.gradients.cases import CASES
from tests.gradients.table import PAGE, row


def test_the_page_has_every_case() -> None:
    lines = [line.split(" | ")[0].removeprefix("| ") for line in PAGE.read_text().splitlines()]
    assert [name for name in lines if name in {c.name for c in CASES}] == [c.name for c in CASES]


@pytest.mark.slow
def test_a_row_of_the_page_comes_out_again() -> None:
    for name in ("linear", "embedding bag max"):
        case = next(c for c in CASES if c.name == name)
        model, rules = row(case).split(" | ")[:2]
        assert f"{model} | {rules} | " in PAGE.read_text()
