"""The fingerprints of the last checkpoints as one text, which any checkpoint format can store."""

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from trainsentry.collectors.fingerprint import Fingerprint, Key
from trainsentry.collectors.run_settings import Settings

VERSION: Final = 1

KEPT: Final = 4
"""Checkpoints whose fingerprints are kept: a stale piece comes from one of the last few."""

Sums = tuple[int, int]


@dataclass(frozen=True)
class Saved:
    """What a rank saved at one step, and the sums that it saved at earlier steps.

    `parts` are the tensors as this rank held them; `wholes` the sums of whole tensors where this rank held a part and
    those of all ranks were added up. `older` has, newest first, a step and the sums of the parts that were there then.
    `settings` are what the run was set to.
    """

    step: int
    rank: int
    world: int
    parts: Mapping[Key, Fingerprint]
    wholes: Mapping[Key, Sums] = field(default_factory=dict)
    older: Sequence[tuple[int, Mapping[Key, Sums]]] = ()
    settings: Settings = field(default_factory=dict)

    def followed_by(self, newer: "Saved") -> "Saved":
        """Return the next checkpoint with this one among its older ones."""
        like = {k: p.sums for k, p in self.parts.items() if k in newer.parts and _same_place(p, newer.parts[k])}
        older = [(self.step, like), *self.older] if newer.step != self.step else list(self.older)
        return replace(newer, older=older[: KEPT - 1])

    def is_constant(self, key: Key) -> bool:
        """Whether a tensor was the same in every checkpoint, of which there is more than one."""
        sums = [then.get(key) for _, then in self.older]
        return bool(sums) and set(sums) == {self.parts[key].sums}

    def to_text(self) -> str:
        """Return a text: 16 bytes a tensor and checkpoint, and the names once."""
        parts = list(self.parts.values())
        place = {part.key: i for i, part in enumerate(parts)}
        content = {
            "version": VERSION,
            "rank": self.rank,
            "world": self.world,
            "step": self.step,
            "tensors": [[p.quantity, p.name, p.dtype, p.whole, p.region, int(p.persistent)] for p in parts],
            "sums": _packed(p.sums for p in parts),
            "wholes": _packed_some(self.wholes, place),
            "older": [[step, *_packed_some(sums, place)] for step, sums in self.older],
            "settings": self.settings,
        }
        return json.dumps(content, separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> "Saved | None":
        """Return what `to_text` wrote; None for an empty text and for that of another version.

        Raises:
            ValueError, KeyError, TypeError, IndexError: when it is no such text.

        """
        content: dict[str, Any] = json.loads(text) if text else {}
        if content.get("version") != VERSION:
            return None
        parts: dict[Key, Fingerprint] = {}
        sums = _unpacked(content["sums"])
        for (quantity, name, dtype, whole, region, persistent), both in zip(content["tensors"], sums, strict=True):
            part = Fingerprint(quantity, name, dtype, tuple(whole), region, *both, persistent=bool(persistent))
            parts[part.key] = part
        keys = list(parts)
        older = [(step, _unpacked_some(places, packed, keys)) for step, places, packed in content["older"]]
        places, packed = content["wholes"]
        wholes = _unpacked_some(places, packed, keys)
        settings = content.get("settings", {})
        return cls(content["step"], content["rank"], content["world"], parts, wholes, older, settings)


def _same_place(a: Fingerprint, b: Fingerprint) -> bool:
    return (a.dtype, a.whole, a.region) == (b.dtype, b.whole, b.region)


def _packed(sums: Iterable[Sums]) -> str:
    return base64.b64encode(np.array(list(sums), dtype="<u8").tobytes()).decode()


def _packed_some(sums: Mapping[Key, Sums], place: Mapping[Key, int]) -> list[Any]:
    """Return the places of some tensors, None for all of them, and their sums."""
    places = [place[key] for key in sums if key in place]
    everything = places == list(range(len(place)))
    return [None if everything else places, _packed(sums[key] for key in sums if key in place)]


def _unpacked(packed: str) -> list[Sums]:
    numbers = np.frombuffer(base64.b64decode(packed), dtype="<u8").reshape(-1, 2).tolist()
    return [(plain, weighted) for plain, weighted in numbers]


def _unpacked_some(places: list[int] | None, packed: str, keys: Sequence[Key]) -> dict[Key, Sums]:
    chosen = keys if places is None else [keys[i] for i in places]
    return dict(zip(chosen, _unpacked(packed), strict=True))
