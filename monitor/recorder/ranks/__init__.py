"""The tree of recorders: what goes up, what comes down, what the root compares."""
