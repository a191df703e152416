"""Computes fingerprints of a torch model and its optimizers."""
