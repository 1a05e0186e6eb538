"""Only one thread at a time changes the shared clipping switch."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.nn import functional as F

from clipwise import Backprop, layers
from clipwise.layers.clipped import switch
from tests.runs import network
from tests.sites import site


@pytest.mark.parametrize("turned", [switch.unclipped, switch.noting])
def test_a_released_sum_waits_until_probes_are_done(turned: object) -> None:
    torch.manual_seed(0)
    model = layers.clip_inputs(network(), input_norm=0.1, grad_norm=0.1)
    clipper = Backprop().attach(site(model))
    x, y = torch.randn(4, 5), torch.randint(0, 3, (4,))
    x[0, 0] = torch.nan  # without the lock, sums would be unclipped

    def losses() -> torch.Tensor:
        return F.cross_entropy(model(x), y, reduction="none")

    # The first steps probe, and change the switch themselves.
    expected = [clipper.clipped_sum(losses()) for _ in range(3)][-1]
    found: list[dict[str, torch.Tensor]] = []
    waiting = losses()
    other = threading.Thread(target=lambda: found.append(clipper.clipped_sum(waiting)))
    with turned():  # type: ignore[operator]
        other.start()
        other.join(0.3)
        assert not found
    other.join(30)
    assert found
    for name, total in found[0].items():
        assert torch.equal(total, expected[name])
