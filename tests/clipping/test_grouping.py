"""How parameters are grouped into parts, and how a total bound is divided."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from clipwise.clipping.thresholds import described_groups, group_parameters, norms_of_parts
from clipwise.errors import ConfigurationError
from clipwise.layers import standardize_weights


def parameters(*names: str) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.zeros(1)) for name in names}


MODEL = parameters("embed.weight", "block.attn.weight", "block.attn.bias", "block.norm.weight", "head.weight")


def test_all_is_one_part() -> None:
    assert group_parameters("all", MODEL) == {"all": list(MODEL)}


def test_tensor_is_a_part_a_parameter() -> None:
    assert group_parameters("tensor", MODEL) == {name: [name] for name in MODEL}


def test_layer_is_a_module() -> None:
    assert group_parameters("layer", MODEL) == {
        "embed": ["embed.weight"],
        "block.attn": ["block.attn.weight", "block.attn.bias"],
        "block.norm": ["block.norm.weight"],
        "head": ["head.weight"],
    }


def test_parameters_of_the_model_itself_are_one_layer() -> None:
    model = parameters("weight", "bias", "head.weight")
    assert group_parameters("layer", model) == {"model": ["weight", "bias"], "head": ["head.weight"]}


def test_a_layer_of_that_name_is_another_one() -> None:
    found = group_parameters("layer", parameters("scale", "model.weight", "model.bias"))
    assert found == {"(model)": ["scale"], "model": ["model.weight", "model.bias"]}


def test_a_parametrized_weight_stays_with_its_bias() -> None:
    model = standardize_weights(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2)))
    assert list(group_parameters("layer", dict(model.named_parameters()))) == ["0", "2"]
    alone = standardize_weights(nn.Conv2d(1, 2, 3))
    assert list(group_parameters("layer", dict(alone.named_parameters()))) == ["model"]


def test_groups_take_parameters_and_modules() -> None:
    lists = [["embed.weight", "head"], ["block"]]
    assert group_parameters(lists, MODEL) == {
        "group 0": ["embed.weight", "head.weight"],
        "group 1": ["block.attn.weight", "block.attn.bias", "block.norm.weight"],
    }
    named = group_parameters({"ends": lists[0], "middle": lists[1]}, MODEL)
    assert list(named) == ["ends", "middle"]


@pytest.mark.parametrize("kind", [set, frozenset])
def test_sets_are_taken_in_one_order(kind: type) -> None:
    """Their own is another one in every process, and a checkpoint would not fit."""
    names = {f"layer{k}.weight": nn.Parameter(torch.zeros(1)) for k in range(9)}
    assert group_parameters([kind(names)], names) == {"group 0": sorted(names)}
    assert described_groups([kind(names)]) == [sorted(names)]
    assert described_groups({"a": kind(names)}) == {"a": sorted(names)}


def test_a_module_is_no_prefix_of_another_ones_name() -> None:
    model = parameters("head.weight", "head2.weight")
    assert group_parameters([["head"], ["head2"]], model)["group 0"] == ["head.weight"]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ("layers", "'layers' is not known"),
        ([["embed", "block"]], "'head.weight' is in no part"),
        ([["embed", "block", "head"], ["head.weight"]], "'head.weight' is in several parts"),
        ([["embed", "block", "head", "tail"]], "'tail' is not a trainable parameter"),
        ([["embed", "block", "head"], []], "'group 1' has no parameters"),
        ({"a": ["embed", "block"], "b": ["block.attn", "head"]}, "in several parts"),
    ],
)
def test_groups_that_miss_or_repeat_a_parameter_are_refused(parts: object, words: str) -> None:
    with pytest.raises(ConfigurationError, match="parts") as error:
        group_parameters(parts, MODEL)  # type: ignore[arg-type]
    assert words in str(error.value)


def test_a_total_is_divided_so_that_the_whole_stays_within_it() -> None:
    norms = norms_of_parts(2.0, ["a", "b", "c"])
    assert math.isclose(math.hypot(*norms.values()), 2.0)
    assert norms_of_parts({"b": 1.0, "a": 3.0}, ["a", "b"]) == {"a": 3.0, "b": 1.0}


@pytest.mark.parametrize("norms", [{"a": 1.0}, {"a": 1.0, "b": 1.0, "c": 1.0}, {"a": 1.0, "c": 1.0}])
def test_norms_that_do_not_fit_the_parts_are_refused(norms: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match="'a', 'b'"):
        norms_of_parts(norms, ["a", "b"])


_IN_ANOTHER_PROCESS = """
import torch
from clipwise import Batch, PerExample
from clipwise.contrib import RandomLayer
from tests.runs import parameters, private_run, train

some = {"0.weight", "0.bias", "2.weight"}
parts = [some, {"2.bias"}]
for strategy in (PerExample(1.0, parts), PerExample(1.0, {"a": some, "b": {"2.bias"}}), Batch(1.0, parts=parts),
                 PerExample(1.0, RandomLayer(parts))):
    model, private = private_run(clipping=strategy, seed=3)
    train(model, private, 2)
    print(private.state_dict()["fingerprint"], {name: p.sum().item() for name, p in parameters(model).items()})
"""


@pytest.mark.slow
def test_sets_of_names_have_one_order_in_every_process() -> None:
    """Otherwise a seeded run could not be repeated, and a run with such parts could not be resumed exactly."""
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _IN_ANOTHER_PROCESS],
            env=os.environ | {"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    texts = [process.communicate()[0] for process in started]
    assert texts[0].count("\n") == 4 and texts[0] == texts[1]
