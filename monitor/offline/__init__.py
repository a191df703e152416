"""Recorded runs: judged again, and compared."""
