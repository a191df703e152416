"""Judges how far a call's results are from the same call in a better precision."""
