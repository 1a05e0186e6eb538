"""The papers by name. A paper is imported when it is asked for."""

from __future__ import annotations

from importlib import import_module

from clipwise.errors import ConfigurationError
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
    if name not in PAPERS:
        raise ConfigurationError(f"paper={name!r} is not known: use one of {', '.join(map(repr, PAPERS))}.")
    found: Paper = import_module(PAPERS[name]).PAPER
    return found
