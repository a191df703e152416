"""Compares what a resumed run holds with what its checkpoint saved."""
