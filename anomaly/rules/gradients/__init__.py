"""Rules over the gradients that the backward pass gives."""
