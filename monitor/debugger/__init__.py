"""The debugger: dumps of selected steps, overflow checks, gradients on disk."""
