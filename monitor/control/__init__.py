"""Changes what is watched while the training runs."""
