"""Draws of these tests are made by one thread unless a test says otherwise."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def drawn_by_one_thread(one_thread: None) -> None:
    """For every test of this folder."""
