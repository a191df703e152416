"""The training process's part of each step: collect, send records, act on incidents."""
