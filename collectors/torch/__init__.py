"""Collectors for PyTorch: hooks, statistics on the device, saving and loading of tensors."""
