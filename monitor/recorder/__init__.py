"""The recorder: detects and writes beside the training process, in a process of its own or in a thread."""
