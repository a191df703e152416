"""What the collectors of every framework need: rows, names, the model as a graph."""
