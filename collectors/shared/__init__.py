"""Shared by the collectors of every framework: rows, forward passes, the model as a graph, private files."""
