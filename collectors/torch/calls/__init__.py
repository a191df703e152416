"""The debugger's torch side: intercepts calls of modules and operations, and reads their tensors and gradients."""
