"""Rules over the buffers of modules."""
