"""Writes and reads tensor dumps in msprobe's layout."""
