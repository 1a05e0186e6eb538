"""A bidirectional LSTM over words, and one dense layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from experiments.models.norms import norm_of, without_norm

PADDING = 0


class BiLSTM(nn.Module):
    """Word vectors, an LSTM in both directions, the mean of its outputs over words, a dense layer."""

    def __init__(
        self, classes: int, words: int, width: int, units: int, norm: str, placement: str, trains_words: bool
    ) -> None:
        super().__init__()
        make_norm = norm_of(norm, positions=False)
        behind = 2 - without_norm(placement)  # the number of layers with a norm, of two
        self.words = nn.Embedding(words, width, padding_idx=PADDING)
        self.words.weight.requires_grad_(trains_words)
        self.lstm = nn.LSTM(width, units, batch_first=True, bidirectional=True)
        self.norm = make_norm(2 * units) if behind >= 1 else nn.Identity()
        self.dense = nn.Linear(2 * units, classes, bias=not (norm == "batch" and behind == 2))
        self.last_norm = make_norm(classes) if behind == 2 else nn.Identity()

    def forward(self, ids_BT: Tensor) -> Tensor:
        """(B, T) ids of words, filled up with 0, to (B, classes)."""
        states_BTD, _ = self.lstm(self.words(ids_BT))
        is_word_BT1 = (ids_BT != PADDING).unsqueeze(-1).to(states_BTD.dtype)
        mean_BD = (states_BTD * is_word_BT1).sum(1) / is_word_BT1.sum(1).clamp(min=1)
        return self.last_norm(self.dense(self.norm(mean_BD)))  # type: ignore[no-any-return]


def bilstm(
    classes: int = 4,
    *,
    norm: str = "none",
    placement: str = "every",
    words: int = 2**14,
    width: int = 64,
    units: int = 64,
    trains_words: bool = True,
) -> BiLSTM:
    """A network for short texts. Davody et al. do not state its sizes; these are ours.

    Args:
        classes: the number of outputs.
        norm: "none", "layer", "group" or "batch", over the units of a text.
        placement: "every": behind the LSTM and behind the dense layer; "hidden": behind the LSTM alone.
        words: the number of ids; 0 is padding.
        width: the length of word vectors.
        units: units of the LSTM in each direction.
        trains_words: whether word vectors are trained; otherwise they are random with deviation 1.
    """
    model = BiLSTM(classes, words, width, units, norm, placement, trains_words)
    if trains_words:
        with torch.no_grad():
            model.words.weight.mul_(width**-0.5)  # length 1, so that Adam's steps matter
    return model
