"""Fault injection in private runs, with checks of the ledger, checkpoints and noise."""
