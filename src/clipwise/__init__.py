"""clipwise: differentially private training of PyTorch models."""

from clipwise import accounting, audit, contrib, gradients, layers, lipschitz
from clipwise.clipping import Backprop, Batch, Lipschitz, NoisedStatistics, PerExample, Quantile
from clipwise.deprecation import moved
from clipwise.engine.make_private import make_private
from clipwise.engine.private import Private
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
from clipwise.ledger.ledger import FileLedger, MemoryLedger
from clipwise.optim.averaging import AveragedParameters
from clipwise.privacy import Adjacency, Event, Part, Sampling, Spent, Unit
from clipwise.sampling import augmentation as augment
from clipwise.validation.check import check

__version__ = "0.2.0"

__all__ = [
    "Adjacency",
    "AuditError",
    "AveragedParameters",
    "Backprop",
    "Batch",
    "BudgetExhausted",
    "CheckpointError",
    "ClipwiseError",
    "ConfigurationError",
    "CoupledExamplesError",
    "Event",
    "FileLedger",
    "LedgerError",
    "Lipschitz",
    "MemoryLedger",
    "NoisedStatistics",
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
    "audit",
    "augment",
    "check",
    "contrib",
    "gradients",
    "layers",
    "lipschitz",
    "make_private",
]

__getattr__ = moved(
    __name__,
    {
        **{name: f"clipwise.contrib.{name}" for name in ("Adaptive", "ByNorm", "Multipliers", "RandomLayer", "Sparse")},
        "Decay": "clipwise.contrib.NormDecay",
        "Public": "clipwise.contrib.PublicData",
        "Released": "clipwise.contrib.ReleasedNorms",
    },
)
