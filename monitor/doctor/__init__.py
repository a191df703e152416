"""What this machine offers, and whether each part works on it: the checks of `trainsentry doctor`."""
