"""Rules over the numbers that the training logs."""
