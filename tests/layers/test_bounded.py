"""Tempered sigmoids are tanh by default, and bounded."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from clipwise.layers.bounded import TemperedSigmoid


def test_the_default_is_tanh() -> None:
    x = torch.linspace(-5, 5, 101, dtype=torch.float64)
    torch.testing.assert_close(TemperedSigmoid()(x), x.tanh())


@given(x=st.floats(-1e300, 1e300), scale=st.floats(0.01, 10), temperature=st.floats(0.1, 10), offset=st.floats(-5, 5))
def test_it_is_bounded_and_increasing(x: float, scale: float, temperature: float, offset: float) -> None:
    layer = TemperedSigmoid(scale, temperature, offset)
    value, higher = layer(torch.tensor([x, x + 1], dtype=torch.float64))
    assert -offset - 1e-12 <= float(value) <= float(higher) <= scale - offset + 1e-12


def test_its_repr_shows_the_settings() -> None:
    assert repr(TemperedSigmoid(1.5)) == "TemperedSigmoid(scale=1.5, temperature=2.0, offset=1.0)"
