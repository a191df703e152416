"""Observes a training process and turns tensors into numbers: hooks, statistics, series, step records."""
