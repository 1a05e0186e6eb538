"""The two implementations of each function: the twin in torch, and the kernel if Triton can run it here."""

import pytest
import torch

from clipwise.kernels import usable

HERE = torch.zeros(1)
needs_triton = pytest.mark.skipif(
    not usable(HERE), reason="no Triton that works on the CPU: install triton and set TRITON_INTERPRET=1"
)


def both(twin, kernel):
    """Parametrizes a test over the twin and the kernel."""
    return [pytest.param(twin, id="twin"), pytest.param(kernel, id="kernel", marks=needs_triton)]
