"""The old place of `Ledger`: to be removed with its last use in engine/."""

from clipwise.ledger.ledger import Ledger as Ledger
