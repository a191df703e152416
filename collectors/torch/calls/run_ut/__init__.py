"""run_ut: records the calls of a step, so that what the training computed can be checked at its end."""
