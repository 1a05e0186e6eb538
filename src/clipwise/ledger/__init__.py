"""Which releases were made: the ledger, its file format, and several runs on one ledger."""
