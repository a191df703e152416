"""The levels of series: a series that leaves its own past for good, from one step on."""
