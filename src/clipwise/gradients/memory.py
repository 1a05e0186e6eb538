"""What a run remembers of its graphs from batch to batch."""

from __future__ import annotations

from dataclasses import dataclass, field

from clipwise.gradients.precision import IEEE, Arithmetic
from clipwise.gradients.rare import Rare
from clipwise.gradients.resolve import Resolver
from clipwise.gradients.walk import Outlines


@dataclass
class Memory:
    """The arithmetic of a run, and what it has learned."""

    arithmetic: Arithmetic = IEEE
    rare: Rare = field(default_factory=Rare)
    outlines: Outlines = field(default_factory=Outlines)
    resolver: Resolver = field(default_factory=Resolver)
    fallbacks: set[str] = field(default_factory=set)  # operations without a rule that were met
