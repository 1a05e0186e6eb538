"""Compiles a traced graph with Inductor: C++ on a CPU, Triton on a GPU.

A norm bounds a contribution only if the gradient that is measured is the one that is summed. Inductor would compute a
value again in every kernel that reads it, with other rounding (a vector or a scalar `exp`, a fused multiply-add, a
bfloat16 value before or after it is rounded). Where terms cancel, the difference can exceed any bound. `_COMPUTED_ONCE`
rules that out: values with several readers are stored, sums are not repeated, and roundings are those of the operations
as written.

Inductor keeps what it has compiled on disk (`torch._inductor.config.fx_graph_cache`), so that the same step starts
faster in the next process. Neither a C++ compiler nor Triton is required: `is_available` looks for them.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from clipwise.gradients.precision import without_autocast

if TYPE_CHECKING:
    from clipwise.engine.tracing import Traced

CompiledRun = Callable[..., Sequence[Tensor]]

_COMPUTED_ONCE: dict[str, object] = {
    # A value that several operations read is stored, however cheap it is, and a sum however short.
    "realize_reads_threshold": 0,
    "realize_opcount_threshold": 0,
    "unroll_reductions_threshold": 1,
    # Casts to bfloat16 round, no product is fused with a sum, and no arithmetic is reordered.
    "emulate_precision_casts": True,
    "cpp.enable_floating_point_contract_flag": "off",
    "cpp.enable_unsafe_math_opt_flag": False,
    # Products stay those of the library, whose arithmetic the engine controls.
    "max_autotune": False,
    "max_autotune_gemm": False,
    # The weights are inputs, and the engine makes the CUDA graph.
    "freezing": False,
    "triton.cudagraphs": False,
}

_log = logging.getLogger("clipwise")


@cache
def is_available(kind: str) -> bool:
    """Whether Inductor has what it needs on a kind of device: Triton, or a C++ compiler."""
    if kind == "cuda":
        return find_spec("triton") is not None
    return kind == "cpu" and any(map(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "clang++", "cl"))))


def compiled(traced: Traced, inputs: Sequence[Tensor]) -> CompiledRun:
    """A compiled form of the graph, for inputs of these shapes. The first time takes up to minutes."""
    from torch._guards import TracingContext, tracing
    from torch._inductor import compile as compile_graph  # imports a compiler
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    _log.info("Compiling the private step with Inductor. The first time this takes up to a few minutes.")
    begin = time.perf_counter()
    # Dropout then draws as in an eager step, so that both can be compared.
    options = _COMPUTED_ONCE | {"fallback_random": traced.is_random}
    # Inductor's cache takes only graphs with a ShapeEnv. All shapes are constant.
    shapes = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    # A cast of autocast in the graph would round sums over examples.
    with torch.no_grad(), without_autocast(), tracing(TracingContext(shapes)):
        run: CompiledRun = compile_graph(traced.graph, [*inputs, *traced.lifted], options=options)
    _log.info("Compiled the private step in %.0f s.", time.perf_counter() - begin)
    return run
