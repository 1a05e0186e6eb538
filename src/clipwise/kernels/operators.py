"""Functions that a traced graph (engine/tracing.py) holds as one operation.

A bound on norms from inner products takes many small operations in pieces of the batch: hundreds of thousands of nodes
for a long context. While a step is traced, such a function is called as an operator of torch, whose body runs when the
graph runs, in pieces, with the same kernels as in an eager step. Otherwise it is called directly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from clipwise.kernels.tracing import is_tracing

_library: Any = torch.library.Library("clipwise", "FRAGMENT")  # type: ignore[no-untyped-call]

P = ParamSpec("P")
R = TypeVar("R")


def operator(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function an operator of a traced graph.

    Args:
        schema: the types of arguments and result, such as "(Tensor x, int k) -> Tensor".
        fake: the result for tensors without memory, of the same arguments.
    """

    def wrap(act: Callable[P, R]) -> Callable[P, R]:
        name = act.__name__.strip("_")
        _library.define(name + schema)
        _library.impl(name, act, "CompositeExplicitAutograd")
        torch.library.register_fake(f"clipwise::{name}", fake, lib=_library)
        traced = getattr(torch.ops.clipwise, name)

        @wraps(act)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            found: R = traced(*args, **kwargs) if is_tracing() else act(*args, **kwargs)
            return found

        return call

    return wrap
