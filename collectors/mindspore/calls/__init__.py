"""What a debugger sees of MindSpore: calls, compiled graphs, kernels."""
