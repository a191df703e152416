"""The training process's side of a step: collect, act on incidents, hand over."""
