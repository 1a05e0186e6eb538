"""clipwise: train PyTorch models under differential privacy, with a guarantee that holds."""

from clipwise import accounting, audit, augment, gradients, layers, lipschitz, models
from clipwise.averaged import AveragedParameters
from clipwise.clipping import (
    Adaptive,
    Backprop,
    Batch,
    ByNorm,
    Decay,
    Lipschitz,
    Multipliers,
    NoisedStatistics,
    PerExample,
    Public,
    Quantile,
    RandomLayer,
    Released,
    Sparse,
)
from clipwise.engine import Private
from clipwise.errors import (
    AuditError,
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
from clipwise.make import make_private
from clipwise.preflight import check
from clipwise.privacy import Adjacency, Event, Part, Sampling, Spent, Unit

__version__ = "0.1.0"

__all__ = [
    "Adaptive",
    "Adjacency",
    "AuditError",
    "AveragedParameters",
    "Backprop",
    "Batch",
    "BudgetExhausted",
    "ByNorm",
    "CheckpointError",
    "ClipwiseError",
    "ConfigurationError",
    "CoupledExamplesError",
    "Decay",
    "Event",
    "FileLedger",
    "LedgerError",
    "Lipschitz",
    "MemoryLedger",
    "Multipliers",
    "NoisedStatistics",
    "Part",
    "PerExample",
    "PrivacyWarning",
    "Private",
    "Public",
    "Quantile",
    "RandomLayer",
    "Released",
    "Sampling",
    "Sparse",
    "Spent",
    "StepError",
    "Unit",
    "UnsupportedModelError",
    "accounting",
    "audit",
    "augment",
    "check",
    "gradients",
    "layers",
    "lipschitz",
    "make_private",
    "models",
]
