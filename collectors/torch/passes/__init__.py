"""Forward passes: where they begin, in which form they run, and whether they compute anything."""
