"""Batch norm with noised statistics."""
