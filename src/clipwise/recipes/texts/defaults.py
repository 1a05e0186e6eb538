"""Default settings for texts. They are provisional; `python -m experiments recipes/texts` searches for them."""

from __future__ import annotations

from clipwise.recipes.kind import Settings
from clipwise.validation.arguments import one_of

HASHED_WORDS, SENTENCES = "hashed-words", "sentences"
PLACES = 2**14  # of hashed words


def text_settings(rows: int, epsilon: float, preset: str, model: str | None = None) -> Settings:
    """Settings by the number of training texts, the budget, and the model or the preset.

    "best" takes sentence embeddings of a public pretrained network.
    """
    one_of("preset", preset, ("fast", "best"))
    steps, rate = 300, 1 / 16
    name = model or (SENTENCES if preset == "best" else HASHED_WORDS)
    return Settings(name, max(1, round(rows * rate)), steps * rate, 2.0)
