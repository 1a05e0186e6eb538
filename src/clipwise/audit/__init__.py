"""What an attacker can really learn: clipwise attacks itself.

`neighbours` compares two neighbouring runs release by release, exactly and at little cost.
"""

from clipwise.audit.findings import Finding, NeighboursReport
from clipwise.audit.neighbours import neighbours

__all__ = ["Finding", "NeighboursReport", "neighbours"]
