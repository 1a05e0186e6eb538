"""How noise slows training, from invented runs."""

from experiments.harness.store import Store
from experiments.normalization import speed
from experiments.normalization.tables import TABLES


def test_speed_is_epochs_until_near_the_noiseless_accuracy_at_one_rate(tmp_path):
    table = next(table for table in TABLES if table.name == "2")
    store = Store(tmp_path)
    for noise, trial, accuracies in (
        (0.0, 0, [0.9, 0.99]),
        (0.0, 1, [0.98, 0.985]),
        (1.0, 1, [0.5, 0.98]),
        (10.0, 1, [0.1, 0.2]),
    ):
        key = table.tried("LeNet-5", "batch norm", noise)[trial].key
        store.cells[key] = {"setting": key, "validation_accuracy_by_epoch": accuracies}
    words = "\n".join(speed.lines(table, store))
    assert "rate 0.001 | 2 | not run |" in words
    assert "rate 0.01 | 1 | not run | not run | not run | 2 | not run | not in 2 |" in words
    assert "rate 0.01: noise 10 does not get there" in words
