"""The debugger: dumps of chosen steps, overflow checks, gradients on disk."""
