"""Random calls of the public API: each returns a correct result, or a clipwise error that names the cause."""
