"""Public statistics in a private run: refreshed and corrected by the engine, named in the statement."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from clipwise import PerExample, make_private
from clipwise.engine import Private
from clipwise.layers import PublicStatistics
from tests.layers.normalized import images, labels, losses_of, public, sound

SIZE = 24


def run(kind: str, noise_multiplier: float = 0.0) -> tuple[torch.nn.Module, Private]:
    model, _ = sound(kind)
    private = make_private(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        TensorDataset(images(SIZE), labels(SIZE)),
        clipping=PerExample(1e9),
        sampling="full",
        noise_multiplier=noise_multiplier,
    )
    return model, private


def test_the_gradient_goes_through_the_public_statistics() -> None:
    """Without noise and clipping it is that of a network whose statistics are computed along the way."""
    model, private = run("public-exact")
    x, y = next(iter(private.loader))
    private.backward(losses_of(model, x, y))
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    h, rows = images(SIZE), public()
    for layer in model:  # the same network, with both kinds of rows side by side
        if hasattr(layer, "running_mean"):
            axes = [0, *range(2, rows.dim())]
            mean, var = rows.mean(axes), rows.var(axes, unbiased=False)
            shape = (1, -1, *[1] * (rows.dim() - 2))
            scale = (layer.weight * (var + layer.eps).rsqrt()).view(shape)
            h, rows = ((t - mean.view(shape)) * scale + layer.bias.view(shape) for t in (h, rows))
        else:
            h, rows = layer(h), layer(rows)
    loss = F.cross_entropy(h, labels(SIZE), reduction="sum") / SIZE
    expected = torch.autograd.grad(loss, list(model.parameters()))
    for (name, gradient), truth in zip(found.items(), expected, strict=True):
        torch.testing.assert_close(gradient, truth, rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize("kind", ["public", "self+public", "public-exact"])
def test_a_plain_loop_trains_and_the_model_can_be_evaluated_at_any_time(kind: str) -> None:
    model, private = run(kind, noise_multiplier=1.0)
    for _ in range(3):
        for x, y in private.loader:
            private.step(losses_of(model, x, y))
            with torch.no_grad():
                model.eval()(images(2, seed=5))
            model.train()
    assert private.steps == 3
    assert PublicStatistics.of(model).is_fresh


def test_the_statement_names_the_public_rows() -> None:
    _, private = run("public", noise_multiplier=1.0)
    said = str(private.statement())
    assert "12 rows, for the statistics of normalization layers" in said
    _, other = run("group", noise_multiplier=1.0)
    assert "public data  none is known here" in str(other.statement())


def test_another_kind_is_another_configuration() -> None:
    assert len({run(kind)[1]._fingerprint() for kind in ("public", "self+public", "group")}) >= 2
