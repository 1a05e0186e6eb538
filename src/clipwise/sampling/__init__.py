"""Who is in the batch: schemes draw it and make its event, a loader hands it out."""

from clipwise.sampling.fetch import Fetcher, pieces
from clipwise.sampling.loader import Piece, PrivateLoader
from clipwise.sampling.schemes import (
    FixedSize,
    Full,
    Partition,
    Poisson,
    Scheme,
    Shuffled,
    TruncatedPoisson,
    make_scheme,
)

__all__ = [
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
    "pieces",
]
