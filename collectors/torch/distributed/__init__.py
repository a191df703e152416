"""Collectives of torch, and where its ranks meet."""
