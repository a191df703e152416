"""Rules over the records of one rank: each needs no baseline. `registry` lists them."""
