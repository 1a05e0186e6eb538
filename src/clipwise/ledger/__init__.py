"""Ledgers of releases in memory or in a file, their file format, budgets, and composition of several runs."""

from clipwise.ledger.ledger import FileLedger, Ledger, MemoryLedger, Snapshot, read

__all__ = ["FileLedger", "Ledger", "MemoryLedger", "Snapshot", "read"]
