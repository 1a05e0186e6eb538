"""Audits: attacks on private runs that test their guarantees.

    neighbours   compares two neighbouring runs release by release: exact, cheap, for everyday tests
    canary       one planted record, many runs: lower bounds on epsilon and mu
    one_run      many planted records, a single run: weaker lower bounds
    membership   black-box attacks on trained models

Audits are not private: they see sums without noise. Run them on synthetic or public records.
"""

from clipwise.audit.canary import canary, one_run
from clipwise.audit.membership import Membership, likelihood_ratio, loss_threshold, membership
from clipwise.audit.neighbours import neighbours
from clipwise.audit.report import AuditReport, Claim, Finding, Measured, NeighboursReport

__all__ = [
    "AuditReport",
    "Claim",
    "Finding",
    "Measured",
    "Membership",
    "NeighboursReport",
    "canary",
    "likelihood_ratio",
    "loss_threshold",
    "membership",
    "neighbours",
    "one_run",
]
