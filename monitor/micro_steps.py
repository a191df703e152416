"""Compares the accumulation that was seen with the one that `watch` was told."""

import logging

logger = logging.getLogger("trainsentry")


def checked_micro_steps(told: int | None, seen: int, step: int) -> int | None:
    """Say when a step had another number of forward passes than was told; return what is still to be checked."""
    if told is None or not seen or seen == told:
        return told
    logger.warning("trainsentry: watch was told grad_acc_steps=%d, but step %d had %d forward passes", told, step, seen)
    return None
