"""The old place of `require_unused`: to be removed with its last use in engine/."""

from clipwise.ledger.multi_run import require_unused as require_unused
