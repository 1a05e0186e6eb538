"""The page of results of texts."""

from __future__ import annotations

from clipwise.recipes.texts.encoder import MODELS
from experiments.recipes.media import HERE
from experiments.recipes.media_page import how, judged, searched, stored, write_page

_SEARCH = """
## Search

A linear model of hashed words or of sentence embeddings, on four fifths of the training texts, validated on the rest.
"as_if": the noise is scaled to that of so many texts, so the search sees the noise of larger data sets; such a run is
not private. One run each, delta 1e-5. The best of a row is bold.
"""
_JUDGEMENT = """
## Judgement

The defaults, on all training texts of these samples (for sentence embeddings: those that were embedded), tested on
their test texts. The defaults are one rule for the learning rate and one number of places, which fit the searches on
both sets. So each set had a part in its own defaults, and its figures here are somewhat optimistic.
"""


def write() -> None:
    """Write it from the results that are there."""
    searches = [stored(f"texts-search-{name}") for name in MODELS]
    judgements = [stored(f"texts-judgement-{name}") for name in MODELS]
    lines = ["# Defaults of `clipwise train` for texts", "", *how((*searches, *judgements))]
    if any(searches):
        lines.append(_SEARCH)
        for found in searches:
            if found is not None:
                lines += [*searched(found["rows"], ("data", "places", "rows", "as_if")), ""]
    if any(judgements):
        lines += [_JUDGEMENT, *judged([row for found in judgements if found is not None for row in found["rows"]])]
    write_page(HERE / "texts.md", lines)
