"""Rules over the records of one rank: each says by itself what is wrong. `registry` lists them."""
