"""`clipwise statement`: the statement of a run, from its ledger alone."""

from __future__ import annotations

import json
from pathlib import Path

from clipwise import PerExample
from tests.cli.calls import clipwise, refused, write_ledger
from tests.runs import private_run, train


def test_it_equals_the_statement_of_the_run(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    model, private = private_run(ledger=path, clipping=PerExample(0.5, parts="layer"), delta=1e-6)
    train(model, private, 3)
    private.close()
    said = private.statement()
    assert clipwise("statement", path).stdout == f"{said}\n"
    assert json.loads(clipwise("statement", path, "--json").stdout) == said.to_dict()


def test_another_delta(tmp_path: Path) -> None:
    path = write_ledger(tmp_path / "ledger", 9)
    plain = json.loads(clipwise("statement", path, "--delta", 1e-7, "--json").stdout)
    assert plain["spent"]["delta"] == 1e-7
    refused(clipwise("statement", path, "--delta", 2), "delta")
