"""Faults put into private runs at named places, and what must hold whatever happens."""
