import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# Several processes share the cores: each uses one thread.
if os.environ.get("PYTEST_XDIST_WORKER"):
    torch.set_num_threads(1)

# The same examples in every run: a failure means that the code changed. To try new ones:
# pytest --hypothesis-profile=default
settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("repeatable")

# Not part of `make test-fast`: long computations, training runs, and processes of their own.
SLOW_FOLDERS = {"api_fuzz", "audit", "benchmarks", "cli", "distributed", "docs", "experiments", "faults"}
SLOW_FOLDERS |= {"fuzz", "recipes", "soundness", "tune", "user_loops"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="the first case of each test, without slow tests")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `--fast`, leave out the slow folders."""
    is_slow = collection_path.parent == config.rootpath / "tests" and collection_path.name in SLOW_FOLDERS
    return True if is_slow and config.getoption("--fast") else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--fast`, keep the first case of every test that is not slow."""
    if not config.getoption("--fast"):
        return
    kept: dict[str, pytest.Item] = {}
    for item in items:
        if item.get_closest_marker("slow") is None:
            kept.setdefault(item.nodeid.partition("[")[0], item)
    items[:] = kept.values()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Use one torch thread: sums and draws do not depend on the number of cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
