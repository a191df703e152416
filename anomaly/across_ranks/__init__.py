"""Rules over the records of several ranks of one step."""
