"""Recorded runs: detection on their files, and comparison of two runs."""
