"""The paper's tables as they are printed."""

from experiments.data.schemas import SCHEMAS
from experiments.lip_dp_sgd.claims import TABLES, contradictions


def test_the_tables_are_those_that_can_be_read():
    assert set(TABLES) == set(SCHEMAS)


def test_claims_by_method_and_norm():
    assert TABLES["adult"].of("lip", "none") == 0.831
    assert TABLES["breast_cancer"].of("lip", "bounded") == 0.924
    assert TABLES["german_credit"].of("fix-lip", "none") == 0.768


def test_what_the_two_tables_share_agrees_but_for_fix_lip():
    for claim in TABLES.values():
        assert claim.table_1[:2] == claim.table_5[:2]
    found = contradictions()
    assert len(found) == 8 and all("fix-lip" in line for line in found[:7])
    assert "repeats the best number of Lip-DP-SGD" in found[-1]
