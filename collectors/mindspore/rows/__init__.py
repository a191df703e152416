"""How a MindSpore tensor becomes a row of statistics."""
