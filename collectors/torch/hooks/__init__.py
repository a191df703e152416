"""Where torch is observed: modules, gradients, optimizers, compiled and captured graphs."""
