"""Forward passes: where they begin, in which form and under which conditions they run."""
