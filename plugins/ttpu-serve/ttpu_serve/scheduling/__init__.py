"""Scheduling: which tokens of which requests run in the next step, and which pages hold their keys and values."""
