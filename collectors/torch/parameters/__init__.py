"""Reads parameters, gradients and optimizer state around an optimizer's step."""
