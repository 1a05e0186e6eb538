"""The paper's search space, and the search of a named data set over it."""

import math

import pytest

from clipwise.accounting import Repetitions
from clipwise.errors import ConfigurationError
from experiments.lip_dp_sgd.tune import main, paper_space


def test_table_3():
    space = paper_space("bounded", group_size=4)
    assert (space["noise_multiplier"].low, space["noise_multiplier"].high) == (0.4, 5)
    assert (space["max_norm"].low, space["max_norm"].high) == (1, 15)
    assert (space["batch_size"].low, space["batch_size"].high) == (32, 512)
    assert (space["learning_rate"].low, space["learning_rate"].high) == (1e-4, 1e-2)
    assert math.isclose(space["alpha"].low, 0.025) and math.isclose(space["alpha"].high, 0.25)
    assert set(paper_space()) == set(space) - {"alpha", "groups"}


def test_an_accounted_search_keeps_its_best_weights(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Repetitions, "draw", lambda self, random=None: 2)
    options = "--accounted --epsilon 4 --mean-runs 3 --sample-rate 0.25 --epochs 1 --method lip --norm bounded"
    main(["digits", *options.split(), "--out", str(tmp_path / "out")])
    assert "The whole search costs epsilon 4 at delta 1e-05" in capsys.readouterr().out.replace("\n", " ")
    assert (tmp_path / "out" / "best.safetensors").exists()


def test_an_ordinary_search_writes_its_front(tmp_path, capsys):
    pytest.importorskip("optuna")
    main(["digits", "--trials", "1", "--out", str(tmp_path)])
    assert (tmp_path / "digits-none-dp-sgd" / "front.md").exists() and "no guarantee" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("iris", "data='iris' is not known"),
        ("digits --method sgd", "method='sgd' is not known"),
        ("digits --method plain", "method='plain' is not known"),
        ("digits --norm batch", "norm='batch' is not known: use one of 'none'"),
        ("digits --method lip --norm group", "use norm='bounded'"),
        ("digits --accounted --method fix-lip --norm group", "use norm='bounded'"),
        ("digits --accounted --method sgd", "method='sgd' is not known"),
        ("digits --epochs 2", "--epochs requires --accounted"),
        ("digits --accounted --trials 5", "--trials is not possible with --accounted"),
        ("digits --device tpu", "device='tpu' is not known"),
    ],
)
def test_what_cannot_be_tuned_is_refused(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        main(arguments.split())
