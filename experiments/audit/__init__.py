"""Attacks on clipwise, and what they recover."""
