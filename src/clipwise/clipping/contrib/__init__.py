"""Methods from papers: clipping policies, frozen entries, one random layer per example."""
