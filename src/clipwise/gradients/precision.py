"""IEEE arithmetic while norms and sums are formed, whatever is switched on for speed.

Norms are upper bounds for float32 or float64. A sum over examples that autocast rounds to bfloat16, or
whose products run in TensorFloat-32, can pass the bound by a per cent, and by more in a large batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def ieee_arithmetic() -> Iterator[None]:
    """No autocast and no reduced precision in matrix products, in this block."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False), _ieee_products():
        yield


@contextmanager
def _ieee_products() -> Iterator[None]:
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # set by backend, in a way that the common switch does not know
        with _ieee_backend("cuda"), _ieee_backend("mkldnn"):
            yield
        return
    if before == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def _ieee_backend(name: str) -> Iterator[None]:
    products: Any = getattr(torch.backends, name).matmul
    before = products.fp32_precision
    products.fp32_precision = "ieee"
    try:
        yield
    finally:
        products.fp32_precision = before
