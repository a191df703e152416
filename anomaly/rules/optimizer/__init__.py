"""Rules on optimizers: their options, their state, and the weights that they update."""
