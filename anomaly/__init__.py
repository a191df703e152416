"""Rules and detectors, the ranker, incidents, the overflow verdict. Works on step records alone."""
