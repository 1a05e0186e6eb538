"""The papers by name. A paper is imported when it is asked for."""

from __future__ import annotations

from importlib import import_module

from clipwise.validation.arguments import one_of
from experiments.harness.paper import Paper

# Each module has a `PAPER`. A new paper is one line here.
PAPERS = {
    "backprop-clipping": "experiments.backprop_clipping.paper",
    "batch-clipping": "experiments.batch_clipping.paper",
    "lip-dp-sgd": "experiments.lip_dp_sgd.paper",
    "normalization": "experiments.normalization.paper",
}


def paper_of(name: str) -> Paper:
    """A paper, or an error that says which there are."""
    one_of("paper", name, PAPERS)
    found: Paper = import_module(PAPERS[name]).PAPER
    return found
