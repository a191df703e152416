"""Parameters, gradients and optimizer state, read around an optimizer's step."""
