"""Rules that need no history of values: each says what is wrong by itself."""
