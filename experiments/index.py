"""All experiments by name. A module is imported when its experiment runs."""

from __future__ import annotations

from importlib import import_module

from clipwise.validation.arguments import one_of
from experiments.harness.command import Command
from experiments.harness.paper import Paper

# Modules with a `PAPER`: the tables and figures of a paper, with common options.
PAPERS = {
    "backprop-clipping": Command(
        "experiments.backprop_clipping.paper", "backpropagation clipping: table 1, figure 5, signal and noise"
    ),
    "batch-clipping": Command(
        "experiments.batch_clipping.paper", "batch clipping: figures 1 to 18, and all strategies at equal epsilon"
    ),
    "lip-dp-sgd": Command("experiments.lip_dp_sgd.paper", "weight clipping: tables 1 and 5, figures 1 to 4"),
    "normalization": Command("experiments.normalization.paper", "normalization layers: tables 2 to 7, figure 1"),
}
# Modules with `main(arguments)` and their own options.
SCRIPTS = {
    "accounting": Command("experiments.accounting.table", "epsilon of six settings by every accountant"),
    "audit/recovery": Command("experiments.audit.recovery", "how much of a known mu each attack recovers"),
    "audit/strategies": Command("experiments.audit.strategies", "claimed and measured privacy of each strategy"),
    "backprop-clipping/tightness": Command(
        "experiments.backprop_clipping.tightness", "how close gradients come to the bounds of clipped layers"
    ),
    "fast-clipping": Command("experiments.fast_clipping.imdb", "the paper's Transformer on IMDB"),
    "fine-tuning": Command(
        "experiments.fine_tuning.table", "a sentence encoder on AG News and IMDB: head only, LoRA, all weights"
    ),
    "lip-dp-sgd/signal": Command(
        "experiments.lip_dp_sgd.signal", "gradient over noise of weight clipping at the first weights"
    ),
    "lip-dp-sgd/tightness": Command(
        "experiments.lip_dp_sgd.tightness", "how far certified bounds are above true gradients"
    ),
    "lip-dp-sgd/tune": Command("experiments.lip_dp_sgd.tune", "tune a named data set over the paper's space"),
    "recipes/tables": Command("experiments.recipes.tables", "defaults of clipwise train on tables"),
    "noised-statistics": Command(
        "experiments.noised_statistics.table", "what noised running statistics are worth on MNIST"
    ),
    "recipes/images": Command("experiments.recipes.images", "defaults of clipwise train for images"),
    "recipes/texts": Command("experiments.recipes.texts", "defaults of clipwise train for texts"),
}


def paper_of(name: str) -> Paper:
    """The paper of a name; raises with the known names otherwise."""
    one_of("paper", name, PAPERS)
    found: Paper = import_module(PAPERS[name].module).PAPER
    return found
