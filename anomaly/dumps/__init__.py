"""Comparisons of tensor dumps."""
