"""The configuration and the statement of a run whose clients add the noise."""

from __future__ import annotations

from typing import Any

import pytest

import clipwise
from clipwise.clipping import NoiseShares, recorded_strategy
from clipwise.privacy import Unit


@pytest.mark.parametrize("counts", [{"dropouts": 4}, {"dropouts": 2, "colluding": 2}, {"colluding": -1}])
def test_counts_that_leave_no_honest_client_are_refused(counts: dict[str, Any]) -> None:
    with pytest.raises(clipwise.ConfigurationError, match="colluding"):
        NoiseShares(clients=4, **counts)


def test_the_statement_names_whom_the_clients_trust() -> None:
    recorded = NoiseShares(clients=9, dropouts=2, colluding=3).describe()
    text = recorded_strategy(recorded).statement_text(recorded, Unit.USER)
    assumptions = " ".join(text.assumptions)
    assert "each of 9 clients" in assumptions and "2 clients that do not answer and 3 that collude" in assumptions
    assert "the server is trusted" in assumptions and "only the noise of its own share" in assumptions
