"""Random uses of the public API: every one gives a right result, or an error of clipwise that names what is wrong."""
