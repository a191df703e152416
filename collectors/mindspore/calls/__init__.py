"""The debugger's MindSpore side: records calls of cells and operations, compiled graphs and kernels."""
