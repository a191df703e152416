"""Runs an example of a page on this rank."""

import os
from pathlib import Path

import torch


def run(setup, example, folder):
    """Run the example after its page's first lines, in a folder; return the names that it leaves."""
    os.chdir(folder)
    if "deepspeed" in example:
        import deepspeed

        # It would compile an extension for inference, behind a lock that outlives a killed process.
        deepspeed.ops.__compatible_ops__ = {}
    names = {"__name__": "example"}
    exec(setup, names)
    exec(example, names)
    os.chdir(Path(__file__).parent)
    return sorted(name for name, value in names.items() if isinstance(value, torch.nn.Module))
