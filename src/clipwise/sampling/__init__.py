"""Sampling: schemes draw batches and make their accounting events; a loader yields the batches."""

from clipwise.sampling.base import Scheme
from clipwise.sampling.fetch import Fetcher
from clipwise.sampling.loader import Piece, PrivateLoader
from clipwise.sampling.microbatches import ByBlock, ByIndex, BySize, ByUser, Cut, microbatches_of
from clipwise.sampling.schemes import (
    DRAWN_BY_MICROBATCHES,
    FixedSize,
    Full,
    Partition,
    Poisson,
    Shuffled,
    TruncatedPoisson,
    make_scheme,
)

__all__ = [
    "DRAWN_BY_MICROBATCHES",
    "ByBlock",
    "ByIndex",
    "BySize",
    "ByUser",
    "Cut",
    "Fetcher",
    "FixedSize",
    "Full",
    "Partition",
    "Piece",
    "Poisson",
    "PrivateLoader",
    "Scheme",
    "Shuffled",
    "TruncatedPoisson",
    "make_scheme",
    "microbatches_of",
]
