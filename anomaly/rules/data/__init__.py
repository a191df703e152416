"""Rules over the data that the model is given."""
