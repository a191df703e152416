"""Level L2: the kernels that one call launches on a device, dumped by the device's own software."""
