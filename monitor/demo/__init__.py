"""The main job on a small real model and real text: train, break one weight, find it."""
