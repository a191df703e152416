"""What is found by comparing dumps."""
