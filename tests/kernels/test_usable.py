"""Where kernels may run."""

import os
import subprocess
import sys

import torch

from clipwise.kernels import usable

CHECK = "import torch; from clipwise.kernels import usable; assert not usable(torch.zeros(1))"


def test_a_cpu_without_the_interpreter_takes_the_twins():
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    subprocess.run([sys.executable, "-c", CHECK], check=True, env=environment)


def test_other_devices_take_the_twins():
    assert not usable(torch.zeros(1, device="meta"))
