"""Several ranks, in the training processes: their agreement, hangs, and ranks that are not watched."""
