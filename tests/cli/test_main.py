from __future__ import annotations

import subprocess
import sys

from clipwise import __version__


def test_the_package_runs_as_a_module():
    found = subprocess.run([sys.executable, "-m", "clipwise", "--version"], capture_output=True, text=True, timeout=300)
    assert (found.returncode, found.stdout) == (0, f"clipwise {__version__}\n"), found.stderr
