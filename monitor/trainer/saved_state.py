"""The monitor's state in a user's checkpoint: the step, the learned state of one rank's detectors, fingerprints."""

import json
from collections.abc import Mapping
from typing import Any, Final

DETECTION_KEYS: Final = {"series", "count", "last_clean"}

NO_RANK: Final = -1


def state_of(
    step: int, detection: dict[str, Any] | None = None, rank: int = NO_RANK, fingerprints: str = ""
) -> dict[str, Any]:
    """Return a state; `fingerprints` are those of the tensors that the checkpoint saves."""
    return {"step": step, "detection": detection, "rank": rank, "fingerprints": fingerprints}


def encoded(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state as plain data, with what the detectors have learned, and their rank, as one text.

    A distributed checkpoint names each key of nested dicts, loads only what has the same keys, and takes any rank's
    value of a key that several ranks save.
    """
    learned = {"rank": state["rank"], "learned": state["detection"]}
    return {"step": state["step"], "detection": json.dumps(learned), "fingerprints": state["fingerprints"]}


def checked_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Check a state that a user loads, and return it; earlier versions had the learned state as nested data.

    Raises:
        ValueError: when it did not come from `state_dict`.

    """
    detection, rank = state.get("detection"), state.get("rank", NO_RANK)
    try:
        if isinstance(detection, str):
            saved = json.loads(detection)
            detection, rank = saved["learned"], saved["rank"]
        fits = isinstance(state.get("step"), int) and (detection is None or set(detection) >= DETECTION_KEYS)
    except (KeyError, TypeError, ValueError):
        fits = False
    if not fits:
        raise ValueError(f"load_state_dict: got keys {sorted(state)}, allowed: the result of state_dict()")
    fingerprints = state.get("fingerprints", "")
    return state_of(state["step"], detection, rank, fingerprints if isinstance(fingerprints, str) else "")


def detection_for(rank: int, state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the learned state for a rank's detectors; None if it is another rank's, which held other shards."""
    detection: dict[str, Any] | None = state["detection"] if state["rank"] in {rank, NO_RANK} else None
    return detection
