"""The healthy range of each series, learned from the run, and how far a row is from it."""
