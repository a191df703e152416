"""TensorBoard event files and their pictures."""
