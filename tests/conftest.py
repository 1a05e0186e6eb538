import os
from collections.abc import Iterator

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


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Use one torch thread: sums and draws do not depend on the number of cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
