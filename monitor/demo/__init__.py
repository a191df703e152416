"""The demo: train a small model on real text, break one weight, find it."""
