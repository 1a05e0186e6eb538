"""Epsilon of six settings by every accountant, with times and two-sided bounds.

`python -m experiments accounting` writes results/table.json and results/table.md beside this file, in
under a minute on two cores.
"""

from __future__ import annotations

import importlib
import json
import platform
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from clipwise import accounting
from clipwise.accounting import accountants, pld
from clipwise.errors import ClipwiseError
from experiments.harness.command import parser_of

DELTA = 1e-5
# (sampling rate, noise multiplier, steps)
SETTINGS = [
    (0.01, 1.0, 1000),
    (0.004, 1.1, 15000),
    (0.1, 4.0, 500),
    (1e-4, 0.7, 200_000),
    (1.0, 20.0, 100),
    (0.01, 0.5, 1000),
]
PACKAGES = ("clipwise-dp", "numpy", "scipy", "dp-accounting", "prv_accountant")
HERE = Path(__file__).parent


def figure(sampling: str, rate: float, z: float, steps: int, accountant: str) -> dict[str, Any]:
    """One epsilon and its time with cold caches, or the reason why the accountant has none."""
    for cached in (pld._directions, pld._of_step, pld._loss_moments):
        cached.cache_clear()
    start = time.perf_counter()
    try:
        epsilon = accounting.epsilon(
            noise_multiplier=z, sample_rate=rate, steps=steps, delta=DELTA, sampling=sampling, accountant=accountant
        )
    except (ClipwiseError, ImportError) as error:
        return {"epsilon": None, "reason": str(error)}
    return {"epsilon": epsilon, "seconds": round(time.perf_counter() - start, 4)}


def two_sided(rate: float, z: float, steps: int) -> dict[str, Any] | None:
    """prv_accountant's bounds from below and above; None if it is not installed or the rate is 1."""
    try:
        prv = importlib.import_module("prv_accountant")
    except ImportError:
        return None
    if rate == 1:
        return None
    start = time.perf_counter()
    accountant = prv.PRVAccountant(
        prvs=[prv.PoissonSubsampledGaussianMechanism(noise_multiplier=z, sampling_probability=rate)],
        max_self_compositions=[steps],
        eps_error=0.02 if steps > 10_000 else 0.005,
        delta_error=1e-4 * DELTA,
    )
    low, estimate, high = accountant.compute_epsilon(delta=DELTA, num_self_compositions=[steps])
    seconds = round(time.perf_counter() - start, 4)
    return {"low": float(low), "estimate": float(estimate), "high": float(high), "seconds": seconds}


def measured() -> list[dict[str, Any]]:
    """A row for each setting and sampling."""
    accounting.epsilon(noise_multiplier=1.0, sample_rate=0.1, steps=1, delta=DELTA)  # warm-up: imports
    rows = []
    for sampling in ("poisson", "fixed-size"):
        for rate, z, steps in SETTINGS:
            found = {name: figure(sampling, rate, z, steps, name) for name in accountants.ACCOUNTANTS}
            row = {"sampling": sampling, "rate": rate, "z": z, "steps": steps, "accountants": found}
            rows.append({**row, "prv_accountant": two_sided(rate, z, steps) if sampling == "poisson" else None})
    return rows


def processor() -> str:
    """The processor's name, if the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), platform.machine())


def version(package: str) -> str:
    """The installed version, or that it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def as_markdown(result: dict[str, Any]) -> str:
    """The results as Markdown."""
    names = list(accountants.ACCOUNTANTS)
    lines = [
        "# Epsilon at delta = 1e-5, by accountant",
        "",
        "Every figure but those of `prv_accountant` is an upper bound by clipwise; the one that counts is `pld`.",
        "`prv_accountant` bounds the true value from both sides. Milliseconds with cold caches in brackets;",
        "the first figure of another library includes its import. A dash: the accountant refuses such steps.",
        "",
        "| sampling | q | z | steps | " + " | ".join(names) + " | prv_accountant |",
        "|---" * (5 + len(names)) + "|",
    ]
    for row in result["rows"]:
        cells = [row["sampling"], f"{row['rate']:g}", f"{row['z']:g}", str(row["steps"])]
        for name in names:
            found = row["accountants"][name]
            known = found["epsilon"] is not None
            cells.append(f"{found['epsilon']:.4f} ({1e3 * found['seconds']:.0f})" if known else "-")
        prv = row["prv_accountant"]
        cells.append(f"{prv['low']:.4f} to {prv['high']:.4f} ({1e3 * prv['seconds']:.0f})" if prv else "-")
        lines.append("| " + " | ".join(cells) + " |")
    versions = ", ".join(f"{name} {v}" for name, v in result["versions"].items())
    lines += ["", f"Versions: {versions}. Processor: {result['processor']}, Python {result['python']}.", ""]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    """Measure and write both files."""
    parser_of("python -m experiments accounting", __doc__).parse_args(arguments)
    result = {
        "delta": DELTA,
        "versions": {name: version(name) for name in PACKAGES},
        "processor": processor(),
        "python": platform.python_version(),
        "rows": measured(),
    }
    folder = HERE / "results"
    folder.mkdir(exist_ok=True)
    (folder / "table.json").write_text(json.dumps(result, indent=1) + "\n")
    (folder / "table.md").write_text(as_markdown(result))
