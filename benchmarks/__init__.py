"""Measurements whose tables the documentation shows."""
