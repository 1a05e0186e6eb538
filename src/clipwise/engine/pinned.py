"""Products that keep their arithmetic in a traced graph.

Norms and sums are computed in a stated arithmetic (gradients/precision.py), whatever the user's settings for speed.
They are settings of the process, and a traced graph does not record them. So a product that was traced under another
setting than the surrounding step becomes an operation of its own, which changes the setting while it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from clipwise.gradients import forms  # noqa: F401 (defines operators)
from clipwise.gradients.precision import IEEE, TF32, Arithmetic

_aten = torch.ops.aten
_MATRICES = (_aten.mm, _aten.bmm, _aten.mv, _aten.dot, _aten.addmm, _aten.baddbmm, _aten.addmv)
_OWN = tuple(getattr(torch.ops.clipwise, name) for name in ("gram_squares", "window_squares"))  # in forms/
_CONVOLUTION = _aten.convolution
_BACKWARD = _aten.convolution_backward
_ONLY_WEIGHT = [False, True, False]
_library: Any = torch.library.Library("clipwise", "DEF")  # type: ignore[no-untyped-call]

Name = Literal["ieee", "tf32"]
Settings = tuple[object, object]  # of matrix products and of convolutions


def settings() -> Settings:
    """The current settings."""
    try:
        matrices: object = torch.get_float32_matmul_precision()
    except RuntimeError:  # set per backend, which the common switch does not support
        matrices = torch.backends.cuda.matmul.fp32_precision
    cudnn: Any = torch.backends.cudnn
    try:
        convolutions = cudnn.allow_tf32
    except RuntimeError:
        convolutions = cudnn.conv.fp32_precision
    return matrices, convolutions


def operation(func: Any, args: tuple[Any, ...], around: Settings) -> Callable[..., Any] | None:
    """The pinned form of an operation that is called under other settings than those around the step, or None."""
    packet = func.overloadpacket
    is_convolution = packet in (_CONVOLUTION, _BACKWARD)
    is_product = is_convolution or packet in _MATRICES
    if packet not in _OWN and not (is_product and _has_float32(args)):
        return None
    now = settings()
    if now[is_convolution] == around[is_convolution]:
        return None
    arithmetic: Name = "ieee" if now[is_convolution] in ("highest", "ieee", False) else "tf32"
    if packet is _BACKWARD:
        return _weight_gradients[arithmetic] if list(args[-1]) == _ONLY_WEIGHT else _refuse
    name = f"{arithmetic}_{packet.__name__}"
    return getattr(torch.ops.clipwise, name) if func is packet.default else _refuse


def _refuse(*_: Any) -> Any:
    raise RuntimeError("a product in the arithmetic of the norms has a form that a traced graph cannot pin")


def _has_float32(args: tuple[Any, ...]) -> bool:
    return any(isinstance(t, Tensor) and t.dtype == torch.float32 for t in args)


def _define(name: str, schema: str, act: Callable[..., Any], arithmetic: Arithmetic) -> None:
    def run(*args: Any, **kwargs: Any) -> Any:
        with arithmetic.products():
            return act(*args, **kwargs)

    _library.define(name + schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"clipwise::{name}", act, lib=_library)


def _weight_gradient(*args: Any) -> Tensor:
    found: Tensor = _BACKWARD(*args, _ONLY_WEIGHT)[1]
    return found


def _of_weight(name: str) -> Callable[..., tuple[None, Tensor, None]]:
    def call(*args: Any) -> tuple[None, Tensor, None]:
        return None, getattr(torch.ops.clipwise, name)(*args[:-1]), None

    return call


_weight_gradients: dict[Name, Callable[..., tuple[None, Tensor, None]]] = {}
for _arithmetic in (IEEE, TF32):
    for _packet in (*_MATRICES, *_OWN, _CONVOLUTION):
        _schema = str(_packet.default._schema)
        _define(f"{_arithmetic.name}_{_packet.__name__}", _schema[_schema.index("(") :], _packet, _arithmetic)
    _own = f"{_arithmetic.name}_weight_gradient"
    _schema = str(_BACKWARD.default._schema)
    _arguments = _schema[_schema.index("(") : _schema.index(", bool[3] output_mask")]
    _define(_own, f"{_arguments}) -> Tensor", _weight_gradient, _arithmetic)
    _weight_gradients[_arithmetic.name] = _of_weight(_own)
