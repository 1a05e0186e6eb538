"""Old public names work, warn and mean the same as the new ones. Files with old words load."""

from __future__ import annotations

import warnings
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import clipwise
from clipwise import Batch, PerExample, Unit, accounting, augment, contrib, deprecation
from clipwise.ledger.run_description import About
from clipwise.privacy import Adjacency, Event, Sampling
from clipwise.report.statement import Statement
from tests.runs import losses_of, private_run, train

OLD_TO_NEW: dict[str, Any] = {
    "Adaptive": contrib.Adaptive,
    "ByNorm": contrib.ByNorm,
    "Decay": contrib.NormDecay,
    "Multipliers": contrib.Multipliers,
    "Public": contrib.PublicData,
    "RandomLayer": contrib.RandomLayer,
    "Released": contrib.ReleasedNorms,
    "Sparse": contrib.Sparse,
}


def deprecated(new: str) -> Any:
    return pytest.warns(DeprecationWarning, match=rf"deprecated.*{new}")


@pytest.mark.parametrize("name", OLD_TO_NEW)
def test_names_that_moved_to_contrib(name: str) -> None:
    with deprecated(r"clipwise\.contrib\." + OLD_TO_NEW[name].__name__):
        assert getattr(clipwise, name) is OLD_TO_NEW[name]
    assert name not in clipwise.__all__


def test_other_names_are_unknown() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = clipwise.Nothing


def test_importing_and_new_names_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        Batch(1.0, microbatches=2)
        PerExample(1.0, matmul_precision="ieee")
        private_run(ema=0.5, augmentation_multiplicity=2)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (lambda: Batch(0.5, mini_sets=4), Batch(0.5, microbatches=4)),
        (lambda: PerExample(0.5, products="tf32"), PerExample(0.5, matmul_precision="tf32")),
    ],
)
def test_fields_of_strategies(old: Any, new: Any) -> None:
    with deprecated("microbatches=|matmul_precision="):
        found = old()
    assert found == new and replace(found) == new and hash(found) == hash(new)


def test_old_fields_can_be_read() -> None:
    with deprecated(r"Batch\.microbatches"):
        assert Batch(0.5, microbatches=4).mini_sets == 4  # type: ignore[attr-defined]
    with deprecated(r"PerExample\.matmul_precision"):
        assert PerExample(matmul_precision="ieee").products == "ieee"  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [contrib.Adaptive, contrib.ByNorm, contrib.Multipliers])
def test_policies(kind: Any) -> None:
    def public() -> contrib.PublicData:
        return contrib.PublicData(torch.utils.data.TensorDataset(torch.ones(4, 3)), lambda model, x: model(x).sum(1))

    with deprecated("microbatch"):
        old = kind(public(), of="mini-set", mini_set_size=2)
    assert old.describe() == kind(public(), of="microbatch", microbatch_size=2).describe()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"averaged": 0.5}, {"ema": 0.5}),
        ({"averaged_views": 2}, {"augmentation_multiplicity": 2}),
        ({"averaged_views": augment.Views(2)}, {"augmentation": augment.Views(2)}),
    ],
    ids=["ema", "multiplicity", "views"],
)
def test_arguments_of_make_private(old: dict[str, Any], new: dict[str, Any]) -> None:
    found = []
    with deprecated(f"{next(iter(new))}="):
        model, private = private_run(seed=3, **old)
    for on, run in ((model, private), private_run(seed=3, **new)):
        train(on, run, 3)
        found.append(torch.cat([p.detach().flatten() for p in on.parameters()]))
        if "ema" in new:
            found[-1] = torch.cat([found[-1], *(a.flatten() for a in run.ema.state_dict()["averages"].values())])
    assert torch.equal(*found)


def test_old_and_new_argument_together_are_refused() -> None:
    with pytest.raises(TypeError, match="averaged is the old name of ema"):
        private_run(averaged=0.5, ema=0.5)


def test_attributes_of_a_run() -> None:
    _, private = private_run(ema=0.5)
    with deprecated(r"Private\.ema"):
        assert private.averaged is private.ema  # type: ignore[attr-defined]


def test_a_local_update_by_its_old_name() -> None:
    def update(model: torch.nn.Module, batch: Any) -> None:
        losses_of(model, batch).mean().backward()

    _, private = private_run(clipping=Batch(1.0, local_update=update))
    batch = next(iter(private.loader))
    with deprecated(r"Private\.step_local_update"):
        assert private.step_sets(batch)  # type: ignore[attr-defined]


def test_the_processes_of_a_statement() -> None:
    model, private = private_run()
    train(model, private, 1)
    statement = private.statement()
    with deprecated(r"Statement\.processes"):
        assert statement.sittings == statement.processes
    values = {field.name: getattr(statement, field.name) for field in fields(statement)}
    with deprecated("processes="):
        assert Statement(**{"sittings" if k == "processes" else k: v for k, v in values.items()}) == statement


def test_the_unit() -> None:
    with deprecated(r"Unit\.MICROBATCH"):
        assert Unit.MINI_SET is Unit.MICROBATCH  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        _ = Unit.NOTHING  # type: ignore[attr-defined]
    plan = {"noise_multiplier": 1.0, "sample_rate": 0.1, "steps": 10, "delta": 1e-5}
    with deprecated("microbatch"):
        assert accounting.epsilon(unit="mini-set", **plan) == accounting.epsilon(unit="microbatch", **plan)


# ------------------------------------------------------------- files of older versions


def test_an_event_with_the_old_unit() -> None:
    event = Event(Sampling.POISSON, Adjacency.ZERO_OUT, Unit.MICROBATCH, 1.0, 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Event.from_dict(event.to_dict() | {"unit": "mini-set"}) == event


def test_the_description_of_a_run() -> None:
    old = {"strategy": "batch", "mini_sets": 4, "parts": {"policy": "adaptive", "of": "mini-set", "mini_set_size": 2}}
    new = {"strategy": "batch", "microbatches": 4}
    new |= {"parts": {"policy": "adaptive", "of": "microbatch", "microbatch_size": 2}}
    assert About.from_dict({"strategy": old}).strategy == new


def test_a_checkpoint(tmp_path: Path) -> None:
    """A checkpoint with the old keys continues with its averages."""
    options: dict[str, Any] = {"clipping": Batch(1.0, microbatches=2), "ema": 0.5, "ledger": tmp_path / "ledger"}
    model, private = private_run(**options)
    train(model, private, 2)
    state, averages = private.state_dict(), private.ema.state_dict()
    private.close()
    strategy = state["configuration"]["strategy"]
    strategy["mini_sets"] = strategy.pop("microbatches")
    state["averaged"] = state.pop("ema")
    again, second = private_run(**options)
    again.load_state_dict(model.state_dict())
    second.load_state_dict(state)
    for name, average in averages["averages"].items():
        assert torch.equal(second.ema.state_dict()["averages"][name], average)
    assert second.steps == 2 and "2 microbatches" in str(second.statement())


def test_the_table_of_values_names_current_ones() -> None:
    assert all(new not in deprecation.VALUES for new in deprecation.VALUES.values())
