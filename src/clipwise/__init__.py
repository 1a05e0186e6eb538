"""clipwise: train PyTorch models under differential privacy, with a guarantee that holds."""

from clipwise import accounting, gradients
from clipwise.clipping import PerExample, Quantile
from clipwise.engine import Private, make_private
from clipwise.errors import (
    BudgetExhausted,
    CheckpointError,
    ClipwiseError,
    ConfigurationError,
    CoupledExamplesError,
    LedgerError,
    PrivacyWarning,
    StepError,
    UnsupportedModelError,
)
from clipwise.ledger import FileLedger, MemoryLedger
from clipwise.preflight import check
from clipwise.privacy import Adjacency, Event, Part, Sampling, Spent, Unit

__version__ = "0.1.0"

__all__ = [
    "Adjacency",
    "BudgetExhausted",
    "CheckpointError",
    "ClipwiseError",
    "ConfigurationError",
    "CoupledExamplesError",
    "Event",
    "FileLedger",
    "LedgerError",
    "MemoryLedger",
    "Part",
    "PerExample",
    "PrivacyWarning",
    "Private",
    "Quantile",
    "Sampling",
    "Spent",
    "StepError",
    "Unit",
    "UnsupportedModelError",
    "accounting",
    "check",
    "gradients",
    "make_private",
]
