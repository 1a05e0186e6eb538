"""What has been released: ledgers in memory or in a file, their file format, budgets, and several runs together."""

from clipwise.ledger.ledger import FileLedger, Ledger, MemoryLedger, Snapshot, read

__all__ = ["FileLedger", "Ledger", "MemoryLedger", "Snapshot", "read"]
