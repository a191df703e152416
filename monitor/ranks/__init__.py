"""The ranks of a run together, as the training processes see them."""
