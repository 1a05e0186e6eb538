"""Default settings for tables. They were chosen by `python -m experiments recipes/tables`, see its results."""

from __future__ import annotations

from clipwise.recipes.kind import Settings


def settings(rows: int, epsilon: float, preset: str) -> Settings:
    """Settings for a table with this many training rows."""
    return Settings(
        model="logistic",
        batch_size=max(1, min(rows, 1024)),
        epochs=20,
        learning_rate=1.0,
        max_norm=1.0,
        counts_share=0.1,
    )
