"""What the recorder writes to, each in a thread of its own, with its gaps."""
