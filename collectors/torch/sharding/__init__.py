"""Locates this rank's part of each parameter; each kind of sharding has one file."""
