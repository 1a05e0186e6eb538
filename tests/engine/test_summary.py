"""How a run is shown in a shell and in a notebook."""

from tests.runs import private_run


def test_a_run_shows_its_settings_and_steps():
    model, private = private_run(epsilon=3.0, delta=1e-3, epochs=1)
    assert "epsilon 3 at delta 0.001" in repr(private) and "steps: 0 of 5" in repr(private)
    model[0].weight.data.add_(1)  # no verification: a debugger may show a run at any time
    assert "<th>steps</th><td>0 of 5</td>" in private._repr_html_()
    assert private.budget == 3.0


def test_a_seeded_run_states_that_it_claims_no_guarantee():
    _, private = private_run(seed=1)
    assert "none claimed" in repr(private) and private.budget is None
