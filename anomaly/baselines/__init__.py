"""What each series looks like while it is healthy, and how far a row is from it."""
