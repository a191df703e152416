"""Builds the calls of a MindSpore dump anew, and runs each on a device and in a better precision."""
