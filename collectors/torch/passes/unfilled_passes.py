"""Tells whether a forward pass runs on memory that nobody has filled.

Before its first schedule, torch.distributed.pipelining learns the shapes between two stages: it calls each stage with
tensors that it has allocated and not written to. What such a pass shows is whatever the memory held before.
"""

import sys
from types import FrameType
from typing import Final

_STAGES: Final = "torch.distributed.pipelining.stage"

_LEARNS_SHAPES: Final = {"_forward_metadata_inference", "_shape_inference"}
"""Methods of a stage that call it without data: of torch 2.13, and of versions before it."""

_MAX_FRAMES: Final = 64
"""How many callers are looked at; between a stage and its outermost module there are some ten."""


def runs_on_unfilled_memory() -> bool:
    """Whether the forward pass that begins now is one by which a pipeline stage learns its shapes."""
    stages = sys.modules.get(_STAGES)
    if stages is None:
        return False
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return False
        code = frame.f_code
        if code.co_name in _LEARNS_SHAPES and code.co_filename == stages.__file__:
            return True
        frame = frame.f_back
    return False
