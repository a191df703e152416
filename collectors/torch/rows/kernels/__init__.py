"""The fused kernels of accelerators: how tensors are cut, launched and combined."""
