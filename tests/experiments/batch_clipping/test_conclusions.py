"""What is concluded from numbers."""

import pytest

from experiments.batch_clipping import tuned
from experiments.batch_clipping.conclusions import EQUAL_CLAIMS, FIGURE_CLAIMS, finals, sentences, verdict
from experiments.batch_clipping.figures import FIGURES


def cell(accuracy, seed=0, judged_by="test", setting="s", epochs=5):
    return {
        "accuracy": accuracy,
        "seed": seed,
        "judged_by": judged_by,
        "setting": setting,
        "epochs": epochs,
        "epochs_asked": 50,
    }


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([50.0, 50.2, 50.1], [49.0, 49.2, 49.1], "it holds"),
        ([49.0, 49.2, 49.1], [50.0, 50.2, 50.1], "it does not hold"),
        ([45.0, 50.0, 55.0], [44.0, 50.0, 53.0], "no difference that shows"),
    ],
)
def test_a_verdict_needs_more_than_chance(first, second, expected):
    assert verdict(first, second) == expected


def test_every_claim_is_about_rows_that_are_declared():
    rows = {(figure.name, row.label) for figure in FIGURES for row in figure.rows}
    for claim in FIGURE_CLAIMS:
        assert {(claim.figure, claim.better), (claim.figure, claim.worse)} <= rows, claim
    for claim in EQUAL_CLAIMS:
        assert {claim.better, claim.worse} <= set(tuned.METHODS), claim


def test_sentences_follow_the_numbers():
    shown = {("18", "ALC", None): [cell(0.5)], ("18", "FGC, equal privacy", None): [cell(0.6)]}
    assert sentences(shown) == [
        "- ALC is better than FGC (figure 18, equal privacy): 50.00 against 60.00, not tested (one seed, 5 of 50 "
        "epochs, one learning rate)."
    ]
    shown["18", "FGC, equal privacy", None] = [cell(0.6, epochs=7)]
    assert sentences(shown) == [], "runs of other lengths do not compare"


def test_many_seeds_of_one_learning_rate_are_no_verdict():
    shown = {
        ("18", row, None): [cell(mean, seed, epochs=50) for seed in range(10)]
        for row, mean in (("ALC", 0.5), ("FGC, equal privacy", 0.6))
    }
    (sentence,) = sentences(shown)
    assert sentence.endswith("60.00 ± 0.00, not tested (one learning rate).")


def test_a_search_and_few_seeds_are_no_verdict():
    shown = {
        (tuned.NAME, method, 1.0): [cell(0.5, judged_by="validation")] * 6 + [cell(0.9), cell(0.9, 1)]
        for method in ("BC, flat, batch norm", "IC, flat, group norm")
    }
    (sentence,) = sentences(shown)
    assert sentence.endswith("not tested (2 seeds).")


def test_at_equal_epsilon_each_budget_has_its_verdict():
    shown = {
        (tuned.NAME, method, budget): [cell(0.5, judged_by="validation")] * 6
        + [cell(mean + 0.001 * seed, seed) for seed in range(3)]
        for budget in (1.0, 8.0)
        for method, mean in (("BC, flat, batch norm", 0.8 if budget == 1 else 0.95), ("IC, flat, group norm", 0.9))
    }
    assert sentences(shown) == [
        "- BC with batch norm is better than IC with group norm (equal epsilon, tuned): at epsilon 1 80.10 ± 0.06 "
        "against 90.10 ± 0.06, it does not hold; at epsilon 8 95.10 ± 0.06 against 90.10 ± 0.06, it holds."
    ]


def test_what_was_chosen_by_validation_is_what_counts():
    trials = [cell(0.5, judged_by="validation", setting="a"), cell(0.7, judged_by="validation", setting="b")]
    tests = [cell(0.9, setting="a"), cell(0.6, setting="b")]
    assert finals([*tests, *trials]) == [tests[1]]
    failed = [{"failed": "why", "judged_by": "validation"}]
    assert finals(failed) == failed
    tie = [cell(0.5, judged_by="validation", setting=s) for s in "ba"]
    assert tuned.chosen(tie) == tuned.chosen(tie[::-1]) == "b"
