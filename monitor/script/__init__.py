"""Watches a training script that does not know of the monitor."""
