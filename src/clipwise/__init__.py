"""clipwise: differentially private training of PyTorch models."""

from clipwise import accounting, audit, distributed, gradients, layers, lipschitz
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
from clipwise.engine.make_private import make_private
from clipwise.engine.private import Private
from clipwise.errors import (
    AuditError,
    BudgetExhausted,
    CheckpointError,
    ClipwiseError,
    ConfigurationError,
    CoupledExamplesError,
    DistributedError,
    LedgerError,
    PrivacyWarning,
    StepError,
    UnsupportedModelError,
)
from clipwise.ledger.ledger import FileLedger, MemoryLedger
from clipwise.optim.averaging import AveragedParameters
from clipwise.privacy import Adjacency, Event, Part, Sampling, Spent, Unit
from clipwise.sampling import augmentation as augment
from clipwise.validation.check import check

__version__ = "0.2.0"

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
    "DistributedError",
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
    "distributed",
    "gradients",
    "layers",
    "lipschitz",
    "make_private",
]
