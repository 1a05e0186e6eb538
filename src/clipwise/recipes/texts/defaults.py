"""Default settings for texts. They are provisional; `python -m experiments recipes/texts` searches for them."""

from __future__ import annotations

from clipwise.recipes.kind import Settings
from clipwise.validation.arguments import one_of

HASHED_WORDS, SENTENCES = "hashed-words", "sentences"
PLACES = 2**16  # of hashed words


def text_settings(rows: int, epsilon: float, preset: str, model: str | None = None) -> Settings:
    """Settings by the number of training texts, the budget, and the model or the preset.

    "best" takes sentence embeddings of a public pretrained network.
    """
    one_of("preset", preset, ("fast", "best"))
    name = model or (SENTENCES if preset == "best" else HASHED_WORDS)
    rate, steps = 1 / 8, 200
    # The more texts and budget, the larger the learning rate that the noise allows.
    learning_rate = min(2.0, max(0.01, 0.1 * (rows * epsilon / 8000) ** 0.65))
    return Settings(name, max(1, round(rows * rate)), steps * rate, round(learning_rate, 4))
