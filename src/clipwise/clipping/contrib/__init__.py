"""Extras from papers: policies for thresholds, frozen entries, one random layer per example."""
