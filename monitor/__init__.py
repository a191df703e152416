"""What wires collecting, detecting and writing together: configuration, recorder, triggers, command line."""
