"""Which devices can run the kernels."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from clipwise import kernels
from clipwise.kernels import usable

CHECK = "import torch; from clipwise.kernels import usable; assert not usable(torch.zeros(1))"


@pytest.mark.slow
def test_a_cpu_without_the_interpreter_uses_the_twins():
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    subprocess.run([sys.executable, "-c", CHECK], check=True, env=environment)


def test_other_devices_use_the_twins():
    assert not usable(torch.zeros(1, device="meta"))


@pytest.mark.parametrize("path", sorted(Path(kernels.__file__).parent.glob("*.py")), ids=lambda path: path.stem)
def test_kernels_are_launched_where_their_operands_are(path):
    """Otherwise nothing waits for them, and a read of their result may return old memory."""
    tree = ast.parse(path.read_text())
    there = [
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.With) and "device_of" in ast.unparse(block.items[0])
        for node in ast.walk(block)
    ]
    launches = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Subscript)]
    assert all(launch in there for launch in launches)
    assert bool(launches) == ("@jit" in path.read_text())
