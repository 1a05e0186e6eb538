"""Invalid arguments raise errors that name them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipwise import Batch, Lipschitz, PerExample, layers, lipschitz
from clipwise.clipping import Quantile
from clipwise.clipping.base import Strategy
from clipwise.clipping.contrib.decay import NormDecay
from clipwise.clipping.contrib.policies import Adaptive, ByNorm, Multipliers
from clipwise.clipping.contrib.random_layer import RandomLayer
from clipwise.clipping.contrib.sparse import Sparse
from clipwise.clipping.contrib.typical import ReleasedNorms
from clipwise.engine import checkpoint
from clipwise.errors import ConfigurationError
from clipwise.validation.arguments import plain, require_takes
from tests.runs import private_run, train

ROWS = torch.randn(6, 4)


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def test_numpy_scalars_become_python_numbers() -> None:
    given = {"a": np.float32(0.5), "b": [np.int64(3), (np.bool_(True), "c")], "d": None}
    found = plain(given)
    assert found == {"a": 0.5, "b": [3, (True, "c")], "d": None}
    assert [type(v) for v in (found["a"], found["b"][0], found["b"][1][0])] == [float, int, bool]
    state = normed().state_dict()
    assert plain({"model": state})["model"] is state  # a state_dict has attributes besides its entries


NUMPY = [
    lambda: PerExample(max_norm=np.float32(0.5)),
    lambda: PerExample(max_norm={"0": np.float64(1.0), "2": np.float32(2.0)}, parts="layer"),
    lambda: PerExample(max_norm=1.0, parts="layer", split={"0": np.float64(1.0), "2": np.int64(2)}),
    lambda: PerExample(max_norm=Quantile(initial=np.float32(0.5), count_noise=1.0, target=np.float64(0.5))),
    lambda: PerExample(max_norm=NormDecay(np.float64(1.0), np.float32(0.5), every=np.int64(2))),
    lambda: PerExample(max_norm=1.0, parts=Adaptive(ReleasedNorms(memory=np.float32(0.5)), every=np.int64(2))),
    lambda: PerExample(max_norm=1.0, parts=ByNorm(ReleasedNorms(), groups=np.int64(2), every=2)),
    lambda: PerExample(max_norm=1.0, parts=Multipliers(ReleasedNorms(), keep_length=np.bool_(True), every=2)),
    lambda: Batch(max_norm=np.float32(1.0), microbatches=np.int64(2)),
    lambda: PerExample(max_norm=1.0, sparse=Sparse(every=np.int64(20), within=np.float64(2.0), after=np.int64(1))),
]


@pytest.mark.parametrize("clipping", NUMPY)
def test_settings_may_be_numpy_scalars_and_are_saved_in_checkpoints(
    clipping: Callable[[], Strategy], tmp_path: Path
) -> None:
    model, private = private_run(clipping=clipping(), steps=np.int64(3), ema=np.float32(0.5))
    for group in private.optimizer.param_groups:
        group["lr"] = np.float64(0.1)
    train(model, private, 1)
    checkpoint.save(tmp_path / "c.pt", {"private": private.state_dict(), "best": np.float64(0.5)})
    loaded = checkpoint.load(tmp_path / "c.pt")
    assert loaded["private"]["configuration"] == private.state_dict()["configuration"] and loaded["best"] == 0.5
    torch.save(private.state_dict(), tmp_path / "own.pt")
    assert torch.load(tmp_path / "own.pt", weights_only=True)["position"] == 1


def test_arguments_of_make_private_may_be_numpy_scalars(tmp_path: Path) -> None:
    budget = {"epsilon": np.float32(3.0), "delta": np.float64(1e-5), "epochs": np.float32(2.0)}
    model = nn.Sequential(layers.ClipInput(1.0), nn.Linear(5, 3))
    clipping = Lipschitz(np.float32(1.0), np.float64(1.0), temperature=np.float32(2.0), fixed=np.bool_(True))
    for options in (budget, {"noise_multiplier": np.float32(1.5), "seed": np.int64(3)}):
        _, private = private_run(model, clipping=clipping, sample_rate=np.float32(0.25), batch_size=None, **options)
        torch.save(private.state_dict(), tmp_path / "run.pt")
        assert (
            torch.load(tmp_path / "run.pt", weights_only=True)["configuration"] == private.state_dict()["configuration"]
        )
        private.close()


@pytest.mark.parametrize("name", ["relative", "keep_length"])
def test_strings_are_not_bools(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"Multipliers: {name} must be True or False, not 'no'"):
        Multipliers(ReleasedNorms(), every=2, **{name: "no"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ledger": 5}, "ledger must be the path of a file, not int"),
        ({"resume_file": 5}, "resume_file must be the path of a file, not int"),
        ({"collate_fn": 3}, "collate_fn must be a function from a list of records to a batch, not int"),
        ({"clipping": PerExample(parts=["0", "2"])}, r"parts=\['0', '2'\] is not known: .* a list of lists"),  # type: ignore[list-item]
        ({"clipping": PerExample(parts=RandomLayer(groups="layers"))}, "RandomLayer: groups='layers' is not known"),
        (
            {"clipping": PerExample(parts=Adaptive(ReleasedNorms(), groups="layers", every=2))},
            "Adaptive: groups='layers' is not known",
        ),
        (
            {"clipping": PerExample(parts=ByNorm(ReleasedNorms(), among="layers", every=2))},
            "ByNorm: among='layers' is not known",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_errors_name_the_argument_that_was_given(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        private_run(**options)


def test_functions_with_a_wrong_signature_are_refused() -> None:
    for function in (lambda a, b: 0, lambda *a: 0, partial(lambda a, b, c: 0, 1), lambda a, b, c=3: 0, print):
        require_takes("f", function, "f(a, b)", 1, 2)
    for function in (lambda a: 0, lambda a, b, c: 0, len):
        with pytest.raises(ConfigurationError, match=r"f is called as f\(a, b\), here with 2 arguments"):
            require_takes("f", function, "f(a, b)", 1, 2)
    with pytest.raises(ConfigurationError, match=r"f must be a function f\(a, b\), not int"):
        require_takes("f", 3, "f(a, b)")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "call",
    [
        lambda given: layers.clip_inputs(given, input_norm=1.0),
        lambda given: layers.set_clips(given, grad_norm=1.0),
        lambda given: layers.replace_batchnorm(given, ROWS),
        layers.without_running_statistics,
        layers.with_released_statistics,
        lambda given: layers.recompute_statistics(given, [ROWS]),
    ],
)
@pytest.mark.parametrize("given", ["net", None, 3])
def test_objects_that_are_not_models_are_refused(call: Any, given: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"model must be a torch\.nn\.Module"):
        call(given)


@pytest.mark.parametrize("rows", [torch.randn(6, 5), torch.ones(6, 4).long()])
def test_public_rows_that_the_model_does_not_take(rows: Tensor) -> None:
    model = normed()
    with pytest.raises(ConfigurationError, match="public: the model does not take such rows"):
        layers.replace_batchnorm(model, rows)
    assert type(model[1]) is nn.BatchNorm1d  # unchanged
    with pytest.raises(ConfigurationError, match="public_batches: the model does not take such rows"):
        layers.recompute_statistics(layers.without_running_statistics(model), [rows])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_public_rows_that_are_not_finite(bad: float) -> None:
    rows = ROWS.clone()
    rows[2, 1] = bad
    with pytest.raises(ConfigurationError, match="public holds values that are not finite"):
        layers.replace_batchnorm(normed(), rows, "public")


@pytest.mark.parametrize("groups", ["4", 1.0, True])
def test_groups_must_be_a_whole_number(groups: Any) -> None:
    with pytest.raises(ConfigurationError, match="groups must be a whole number"):
        layers.replace_batchnorm(normed(), None, "group", groups=groups)


@pytest.mark.parametrize("uses", [0, "2", [1]])
def test_uses_must_be_a_mapping(uses: Any) -> None:
    with pytest.raises(ConfigurationError, match="uses must map layer names to their number of uses"):
        layers.clip_inputs(nn.Linear(4, 3), input_norm=1.0, uses=uses)


def test_a_local_update_takes_a_model_and_a_microbatch() -> None:
    for update in ("train", len, lambda model: None):
        with pytest.raises(ConfigurationError, match=r"local_update.*\(model, microbatch\)"):
            Batch(1.0, local_update=update)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [4, "4", (-4,), (4.0,), {"x": 4}])
def test_an_input_shape_is_a_list_of_sizes(shape: Any) -> None:
    model = nn.Sequential(layers.ClipInput(1.0), nn.Linear(4, 3))
    strategy = Lipschitz(1.0, 1.0, loss=lipschitz.SoftmaxCrossEntropy(), input_shape=shape)
    with pytest.raises(ConfigurationError, match="input_shape must be the sizes of one example"):
        private_run(model, clipping=strategy)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: layers.PublicBatchNorm(0), "num_features must be a whole number"),
        (lambda: layers.PublicBatchNorm(2.5), "num_features must be a whole number"),  # type: ignore[arg-type]
        (lambda: layers.PublicBatchNorm(4, eps=-1.0), "eps must be a finite number that is at least 0"),
        (lambda: layers.PublicBatchNorm(4, eps=float("nan")), "eps must be a finite number that is at least 0"),
        (lambda: layers.StandardizedWeight(eps="x"), "eps must be a finite number that is at least 0"),  # type: ignore[arg-type]
    ],
)
def test_arguments_of_layers(call: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        call()


@pytest.mark.parametrize(
    ("sampling", "adjacency", "usable"),
    [("poisson", "replace-one", "use 'zero-out'.$"), ("fixed-size", "zero-out", "use 'replace-one'.$")],
)
def test_the_error_names_a_supported_adjacency(sampling: str, adjacency: str, usable: str) -> None:
    with pytest.raises(ConfigurationError, match=f"not supported with sampling='{sampling}': {usable}"):
        private_run(sampling=sampling, adjacency=adjacency)
