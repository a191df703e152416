"""What differs between CPU, CUDA, NPU and other devices; nothing outside this folder asks for a device's type."""
