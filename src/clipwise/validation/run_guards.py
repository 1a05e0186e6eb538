"""Old names, for engine/private.py: to be removed with their last use."""

from clipwise.validation.step_inputs import require_no_hooks
from clipwise.validation.training_loop import LoopWarnings as Watch
from clipwise.validation.training_loop import changed_since_last_run, require_alone

__all__ = ["Watch", "changed_since_last_run", "require_alone", "require_no_hooks"]
