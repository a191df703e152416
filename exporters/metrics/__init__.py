"""Metrics of a run: aggregates and incidents, never a series for each parameter."""
