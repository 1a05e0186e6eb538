"""Neighbouring runs of every kind are as declared; deviations are reported."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import clipwise
from clipwise import Batch, NoisedStatistics, PerExample, Quantile, audit, layers
from clipwise.audit.trial import run_of
from clipwise.contrib import Multipliers, PublicData, RandomLayer
from clipwise.errors import AuditError, ConfigurationError
from clipwise.noise import mechanism
from clipwise.noise.gaussian import add_gaussian
from tests.audit.bug import Subject, losses, network, one_release, rows, small
from tests.audit.inside import FULL, INSIDE, backprop, lipschitz, loud


def test_one_stream_for_two_parts_is_found_in_every_order_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_for_all(secret: bytes, sums: Sequence[Tensor], stds: Sequence[float], divisor: float) -> None:
        for total, std in zip(sums, stds, strict=True):
            add_gaussian(secret, [total], [std], divisor)

    monkeypatch.setattr(mechanism, "add_gaussian", one_for_all)
    for turned in (False, True):
        model = network()
        if turned:
            model[0].weight = nn.Parameter(model[0].weight.detach().t().contiguous().t())
        run, data = run_of(model, losses, rows(), clipping=PerExample(1.0, parts="layer"))
        assert "key" in {finding.what for finding in audit.neighbours(run, data).findings}


FIXED: dict[str, Any] = {"sampling": "fixed-size", "sample_rate": None, "batch_size": 16}


def normalized() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def public_norm() -> Subject:
    model, _ = layers.replace_batchnorm(normalized(), torch.randn(16, 5), "public")
    return run_of(model, losses, rows())


def lot_norm(**options: Any) -> Subject:
    clipping = Batch(max_norm=1.0, **options)
    return run_of(layers.without_running_statistics(normalized()), losses, rows(), clipping, **FIXED)


def released_statistics() -> Subject:
    clipping = PerExample(max_norm=1.0, running_statistics=NoisedStatistics())
    return run_of(layers.with_released_statistics(normalized()), losses, rows(), clipping)


def scaled() -> Subject:
    public = PublicData([rows()], losses)
    return small(clipping=PerExample(max_norm=1.0, parts=Multipliers(public)))


RUNS = {
    "poisson": small,
    "layers": partial(small, clipping=PerExample(max_norm=0.5, parts="layer")),
    "normalize": partial(small, clipping=PerExample(max_norm=1.0, mode="normalize")),
    "quantile": partial(small, clipping=PerExample(max_norm=Quantile(count_noise=0.3))),
    "pieces": partial(small, max_physical_batch_size=4),
    "fixed-size": partial(small, **FIXED),
    "shuffled": partial(small, sampling="shuffled", sample_rate=None, batch_size=8),
    "full": one_release,
    "batch": partial(small, clipping=Batch(max_norm=1.0)),
    "microbatches": partial(small, clipping=Batch(max_norm=1.0, microbatches=4), **FIXED),
    "users": partial(small, clipping=Batch(max_norm=1.0), group=[i // 2 for i in range(32)]),
    "public batch norm": public_norm,
    "batch norm under batch clipping": lot_norm,
    "noised statistics": partial(lot_norm, running_statistics=NoisedStatistics()),
    "released statistics": released_statistics,
    "lipschitz": lipschitz,
    "lipschitz, fixed-size": partial(lipschitz, **FIXED),
    "backprop": backprop,
    "backprop, fixed-size": partial(backprop, **FIXED),
    "averaged views": partial(small, augmentation_multiplicity=2),
    "scaled parameters": scaled,
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_as_declared(name: str) -> None:
    report = audit.neighbours(*RUNS[name](), records=(0, 3))
    report.require()
    assert report.pairs == 6 and 0 < report.worst <= 1 + 1e-4
    assert "As declared" in str(report)


def test_layers_that_are_drawn_for_each_example_are_compared_by_the_last_one() -> None:
    audit.neighbours(*small(clipping=PerExample(max_norm=1.0, parts=RandomLayer()))).require()


def test_a_batch_may_be_a_mapping() -> None:
    def of_mapping(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return losses(model, batch["x"], batch["y"])

    batch = dict(zip("xy", rows(), strict=True))
    audit.neighbours(*run_of(network(), of_mapping, batch), records=(1,)).require()


def test_one_layer_of_dropout_is_compared_by_the_last_record() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(5, 3))
    audit.neighbours(*run_of(model, losses, rows())).require()


def test_the_worst_record_uses_up_what_is_allowed() -> None:
    assert audit.neighbours(*one_release()).worst == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("name", INSIDE)
def test_a_worst_record_uses_up_what_is_allowed_where_gradients_are_bounded_inside(name: str) -> None:
    subject, x = INSIDE[name]
    report = audit.neighbours(*subject(**FULL), changes={"worst": lambda record: loud(x)})
    report.require()
    assert 0.99 < report.worst <= 1


@pytest.mark.parametrize("name", INSIDE)
def test_an_empty_step_is_a_step(name: str) -> None:
    subject = INSIDE[name][0](sample_rate=0.01, steps=8)
    report = audit.neighbours(*subject, changes={"as it is": lambda record: record})
    assert not report.findings and report.history[0].count == 8


def test_a_loss_that_couples_examples_is_found() -> None:
    """The probe of the engine is switched off; neighbours() does not inspect gradients."""
    make_run, data = run_of(
        network(),
        lambda model, x, y: losses(model, x, y) * len(x),  # no gradient shows it
        rows(),
        PerExample(max_norm=1e4),
        probe_independence=False,
    )
    report = audit.neighbours(make_run, data, changes={"as it is": lambda record: record})
    assert not report.findings  # nothing is found within so large a bound

    make_run, data = run_of(
        network(), lambda model, x, y: losses(model, x, y) * (-1) ** len(x), rows(), probe_independence=False
    )
    report = audit.neighbours(make_run, data)
    assert {finding.what for finding in report.findings} == {"sensitivity", "joint"}


def full_run(dataset: Any, steps: int) -> Iterator[tuple[nn.Sequential, Tensor, clipwise.Private]]:
    """Yields the model and the inputs at each step, so that the caller can act in between."""
    model = network()
    private = clipwise.make_private(
        model, torch.optim.SGD(model.parameters(), lr=0.1), dataset, sampling="full", noise_multiplier=1.0, steps=steps
    )
    for _ in range(steps):
        for x, y in private.loader:
            private.step(losses(model, x, y))
            yield model, x, private


def test_steps_that_depend_on_the_data_are_found() -> None:
    def make_run(dataset: Any) -> None:
        for _, x, _ in full_run(dataset, steps=3):
            if len(x) < 32:
                return

    report = audit.neighbours(make_run, torch.utils.data.TensorDataset(*rows()))
    assert any(finding.what == "control flow" for finding in report.findings)


def test_a_parameter_that_is_moved_past_the_noise_is_found() -> None:
    def make_run(dataset: Any) -> None:
        for model, x, private in full_run(dataset, steps=2):
            with torch.no_grad():
                model[0].bias.add_(x.mean())
            private.declare_update("post-processing", "which is not true")

    report = audit.neighbours(make_run, torch.utils.data.TensorDataset(*rows()))
    assert any(finding.what == "state" and "'0.bias'" in finding.text for finding in report.findings)
    with pytest.raises(AuditError, match=r"'0\.bias' differs between neighbouring runs"):
        report.require()


def test_a_record_that_is_never_drawn_proves_nothing() -> None:
    report = audit.neighbours(*small(sample_rate=0.001, steps=1))
    assert not report.ok and not report.findings
    with pytest.raises(AuditError, match="Nothing was compared"):
        report.require()


def test_a_function_that_makes_no_run_or_several_is_refused() -> None:
    make_run, data = small()
    with pytest.raises(AuditError, match="made no private run"):
        audit.neighbours(lambda dataset: None, data)
    with pytest.raises(AuditError, match="several private runs"):
        audit.neighbours(lambda dataset: (make_run(dataset), make_run(dataset)), data)


@pytest.mark.parametrize("index", [-1, 32, True, "a"])
def test_an_invalid_index_is_refused(index: Any) -> None:
    with pytest.raises(ConfigurationError, match="records"):
        audit.neighbours(*small(), records=(index,))


class Listed(Dataset[Any]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((5,), float(index)), index % 3


def test_any_map_style_data_set_is_accepted() -> None:
    make_run, _ = small()
    audit.neighbours(make_run, Listed()).require()


def test_a_run_under_audit_keeps_no_ledger_file(tmp_path: Any) -> None:
    make_run, data = small(ledger=tmp_path / "ledger", resume_file=tmp_path / "resume")
    audit.neighbours(make_run, data).require()
    assert list(tmp_path.iterdir()) == []


def test_keys_in_use_are_not_touched(tmp_path: Any) -> None:
    """A run that was made earlier is not observed."""
    model = network()
    data = torch.utils.data.TensorDataset(*rows())
    private = clipwise.make_private(
        model, torch.optim.SGD(model.parameters(), lr=0.1), data, batch_size=8, noise_multiplier=1.0, steps=2
    )
    context = private._context
    before = context.keys.key.secret_bytes()
    audit.neighbours(*small()).require()
    assert (
        private._context.observer is None
        and not private._context.is_seeded
        and private._context.keys.key.secret_bytes() == before
    )
