"""Collectors for MindSpore."""
