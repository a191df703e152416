"""Where a rank's part of each parameter lies: one file for each kind of sharding."""
