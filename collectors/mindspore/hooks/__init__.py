"""Where MindSpore is observed: cells, gradients, optimizers, collectives."""
