"""Epsilons of clipwise beside those of other accountants."""
