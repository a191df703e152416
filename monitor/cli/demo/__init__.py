"""`trainsentry demo`: the command, its ranks, and what it shows."""
