"""What a measurement is made on, and how it is kept from chance."""

import platform
import subprocess
import sys

import pytest

FAULTS_OF_A_LAST_ALLOCATION = """
import resource
import numpy
from experiments.harness.environment import keep_memory
if {kept}:
    keep_memory()
for _ in range(8):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    numpy.empty(2**26, dtype=numpy.uint8).fill(1)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is asked to keep memory")
def test_memory_that_is_kept_is_not_mapped_again() -> None:
    def faults(kept: bool) -> int:
        code = FAULTS_OF_A_LAST_ALLOCATION.format(kept=kept)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert faults(kept=True) < 10
    assert faults(kept=False) > 10
