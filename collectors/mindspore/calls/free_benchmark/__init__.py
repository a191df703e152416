"""The task free_benchmark: each call is made again with a small change of its input, and the results are compared."""
