"""The state that a run keeps about its graphs between batches."""

from __future__ import annotations

from dataclasses import dataclass, field

from clipwise.gradients.precision import IEEE, Arithmetic
from clipwise.gradients.rare import Rare
from clipwise.gradients.resolve import Resolver
from clipwise.gradients.walk import Outlines


@dataclass
class Memory:
    """The arithmetic of a run, and its cached outlines and layouts."""

    arithmetic: Arithmetic = IEEE
    rare: Rare = field(default_factory=Rare)
    outlines: Outlines = field(default_factory=Outlines)
    resolver: Resolver = field(default_factory=Resolver)
    fallbacks: set[str] = field(default_factory=set)  # operations without a rule seen so far
