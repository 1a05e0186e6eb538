"""The papers by name. A paper is imported when it is asked for."""

from __future__ import annotations

from importlib import import_module

from clipwise.known import require_known
from clipwise.reproduce.paper import Paper

# Each module has a `PAPER`. A new paper is one line here.
PAPERS = {
    "backprop-clipping": "clipwise.reproduce.backprop_clipping.paper",
    "batch-clipping": "clipwise.reproduce.batch_clipping.paper",
    "lip-dp-sgd": "clipwise.reproduce.lip_dp_sgd.paper",
    "normalization": "clipwise.reproduce.normalization.paper",
}


def paper_of(name: str) -> Paper:
    """A paper, or an error that says which there are."""
    require_known("paper", name, PAPERS)
    found: Paper = import_module(PAPERS[name]).PAPER
    return found
