"""TensorBoard event files and the pictures in them."""
