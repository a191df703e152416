"""The recorder's sinks, each with its own thread, and their gaps."""
