"""Default settings for tables, chosen by `python -m experiments recipes/tables`; see experiments/recipes/tables.md."""

from __future__ import annotations

from clipwise.recipes.kind import Settings

# From this many rows times epsilon on, the network is better than the linear model: below, it only fits more noise.
ENOUGH_FOR_A_NETWORK = 10_000
SAMPLE_RATE = 1 / 16
LARGEST_BATCH = 8192
EPOCHS = {"fast": 20.0, "best": 30.0}
# The share of the budget for noised counts, and the decay of the average of the weights.
COUNTS_SHARE = 0.1
EMA = 0.98


def settings(rows: int, epsilon: float, preset: str) -> Settings:
    """Settings for a table with this many training rows. They depend on public numbers alone."""
    network = rows * epsilon >= ENOUGH_FOR_A_NETWORK
    return Settings(
        model="mlp" if network else "linear",
        batch_size=max(1, min(round(rows * SAMPLE_RATE), LARGEST_BATCH)),
        epochs=EPOCHS[preset],
        learning_rate=0.03,
        optimizer="adam",
        max_norm=1.0,
        ema=EMA,
        counts_share=COUNTS_SHARE,
    )
