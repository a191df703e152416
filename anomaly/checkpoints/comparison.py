"""Compares the tensors of a resumed run with what was saved of them, and says what else they are."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from trainsentry.anomaly.checkpoints.saved_fingerprints import Saved, Sums
from trainsentry.collectors.fingerprint import Fingerprint, Key, combined
from trainsentry.collectors.run_settings import Settings
from trainsentry.collectors.series import BUFFER

CHANGED: Final = "changed"
STALE: Final = "stale"
SWAPPED: Final = "swapped"
OTHER_RANK: Final = "other rank"
NEW: Final = "new"
MISSING: Final = "missing"
SHAPE: Final = "shape"
DTYPE: Final = "dtype"

Found = Mapping[Key, Fingerprint]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A tensor that is not what was saved: what it is instead, as `label` and in words that follow its name."""

    key: Key
    rank: int
    label: str
    words: str


@dataclass(frozen=True)
class Resumed:
    """What one rank has loaded: the saved fingerprints, perhaps another rank's, and its tensors and `settings` now.

    `buffers_moved`: buffers were read after a forward pass, which may have changed them. `complete`: every optimizer is
    known, so that state which is not there is missing.
    """

    rank: int
    world: int
    saved: Saved
    found: Found
    buffers_moved: bool = False
    complete: bool = True
    settings: Settings = field(default_factory=dict)

    @property
    def is_own(self) -> bool:
        """Whether the same rank of as many ranks saved it."""
        return (self.saved.rank, self.saved.world) == (self.rank, self.world)


def mismatches(ranks: Mapping[int, Resumed]) -> list[Mismatch]:
    """Return what differs on any of the ranks; what differs alike on several ranks is said of the lowest.

    Parts are compared where a rank has loaded its own checkpoint. Elsewhere whole tensors are, those of sharded ones
    added up over the ranks; what cannot be compared is left out.
    """
    found: dict[tuple[Key, str], Mismatch] = {}
    for rank in sorted(ranks):
        for each in _of_rank(ranks[rank], ranks):
            found.setdefault((each.key, each.words), each)
    for each in _of_wholes(ranks):
        found.setdefault((each.key, each.words), each)
    return list(found.values())


def _of_rank(resumed: Resumed, ranks: Mapping[int, Resumed]) -> Iterator[Mismatch]:
    """Yield the mismatches that a rank's own tensors show."""
    saved, rank = resumed.saved, resumed.rank
    names = _Names(saved, {key: part.sums for key, part in saved.parts.items()})
    for key, part in saved.parts.items():
        now = resumed.found.get(key)
        if now is None:
            if resumed.is_own and part.persistent and (resumed.complete or not part.is_state):
                yield Mismatch(key, rank, MISSING, f"is missing, but was saved at step {saved.step}")
        elif resumed.is_own or (saved.world != resumed.world and not part.region and not now.region):
            each = _compared(resumed, part, now, names)
            if each is not None and not _is_of_a_replica(each, part, now, ranks):
                yield _as_of_other_rank(each, now, ranks)
        elif saved.world != resumed.world and not now.region and key in saved.wholes:
            whole = Fingerprint(*key, part.dtype, part.whole, "", *saved.wholes[key])
            each = _compared(resumed, whole, now, _Names(saved, saved.wholes))
            if each is not None:
                yield each
    if resumed.is_own:
        for key, now in resumed.found.items():
            if key not in saved.parts and now.persistent:
                yield Mismatch(key, rank, NEW, f"is new: the checkpoint of step {saved.step} has nothing of it")


def _compared(resumed: Resumed, part: Fingerprint, now: Fingerprint, names: "_Names") -> Mismatch | None:
    """Compare a tensor with what was saved of it; both are the same part of the whole, or should be."""
    saved, key = resumed.saved, part.key
    if part.whole != now.whole or part.dtype != now.dtype:
        if saved.world != resumed.world or not part.persistent:
            return None  # tensor parallelism shapes its parts by the number of ranks
        if part.whole != now.whole:
            words = f"has shape {list(now.whole)}, and was saved with {list(part.whole)}"
            return Mismatch(key, resumed.rank, SHAPE, words)
        return Mismatch(key, resumed.rank, DTYPE, f"has dtype {now.dtype}, and was saved as {part.dtype}")
    if part.region != now.region or part.sums == now.sums or not _is_comparable(resumed, part):
        return None
    return Mismatch(key, resumed.rank, *names.instead(part, now.sums))


def _is_comparable(resumed: Resumed, part: Fingerprint) -> bool:
    """Whether a buffer, which passes may change, should still be what was saved; other tensors should."""
    saved, constant = resumed.saved, resumed.saved.is_constant(part.key)
    if part.quantity != BUFFER or constant:
        return True
    return not resumed.buffers_moved and (part.persistent or not saved.older)


class _Names:
    """What was saved, by its sums: of which tensor they are, and of which checkpoint."""

    def __init__(self, saved: Saved, sums: Mapping[Key, Sums]) -> None:
        self._saved = saved
        self._sums = sums
        self._by_sums: dict[tuple[str, tuple[int, ...], Sums], Key] | None = None

    def instead(self, part: Fingerprint, now: Sums) -> tuple[str, str]:
        """Return what a tensor is that is not what was saved of it: the label, and words."""
        step, key = self._saved.step, part.key
        if now == (0, 0):
            return CHANGED, f"is all zeros, which is not what was saved at step {step}"
        for then, sums in self._saved.older:
            if sums.get(key) == now:
                return STALE, f"is as it was in the older checkpoint of step {then}, not as saved at step {step}"
        other = self._of_sums(part, now)
        if other is not None:
            quantity, name = other
            words = name if quantity == key[0] else f"{quantity} of {name}"
            return SWAPPED, f"is what was saved of {words} at step {step}"
        return CHANGED, f"is not what was saved at step {step}"

    def _of_sums(self, part: Fingerprint, now: Sums) -> Key | None:
        if self._by_sums is None:
            self._by_sums = {}
            for key, sums in self._sums.items():
                saved = self._saved.parts[key]
                self._by_sums.setdefault((saved.dtype, saved.whole, sums), key)
        return self._by_sums.get((part.dtype, part.whole, now))


def _is_of_a_replica(each: Mismatch, part: Fingerprint, now: Fingerprint, ranks: Mapping[int, Resumed]) -> bool:
    """Whether a buffer is what another rank saved: replicas' running statistics differ, and one rank's are saved."""
    if part.quantity != BUFFER or part.region:
        return False
    saved = (r.saved.parts.get(each.key) for rank, r in ranks.items() if rank != each.rank and r.is_own)
    return any(other is not None and other.sums == now.sums for other in saved)


def _as_of_other_rank(each: Mismatch, now: Fingerprint, ranks: Mapping[int, Resumed]) -> Mismatch:
    """Return a mismatch, which names the rank that saved what is there now, if one did."""
    for rank, resumed in ranks.items():
        other = resumed.saved.parts.get(each.key)
        if each.label != CHANGED or now.sums == (0, 0) or rank == each.rank or other is None or not resumed.is_own:
            continue
        if other.numel == now.numel and other.dtype == now.dtype and other.moved_to(now.region) == now.sums:
            words = f"is what rank {rank} saved of it at step {resumed.saved.step}"
            return Mismatch(each.key, each.rank, OTHER_RANK, words)
    return each


def _of_wholes(ranks: Mapping[int, Resumed]) -> Iterator[Mismatch]:
    """Yield the mismatches of sharded tensors, added up, where a rank has loaded another's checkpoint."""
    first = next((ranks[rank] for rank in sorted(ranks)), None)
    if first is None or len(ranks) != first.world or all(r.is_own for r in ranks.values()):
        return
    saved = first.saved
    wholes = {key: part.sums for key, part in saved.parts.items() if not part.region} | dict(saved.wholes)
    names = _Names(saved, wholes)
    for key, part in saved.parts.items():
        parts = [r.found[key] for r in ranks.values() if key in r.found]
        is_sharded = part.region or any(p.region for p in parts)
        now = combined(parts) if len(parts) == len(ranks) and is_sharded else None
        if now is None or key not in wholes:
            continue
        before = Fingerprint(*key, part.dtype, part.whole, "", *wholes[key], persistent=part.persistent)
        each = _compared(first, before, now, names)
        if each is not None:
            yield _part_of_the_rank(each, ranks)


def _part_of_the_rank(each: Mismatch, ranks: Mapping[int, Resumed]) -> Mismatch:
    """Return a mismatch of a whole tensor, said of the rank whose part another rank has too, if there is one."""
    if each.label != CHANGED:
        return each
    parts = {rank: r.found[each.key] for rank, r in ranks.items()}
    for rank, part in parts.items():
        for other, theirs in parts.items():
            differs = other < rank and theirs.region != part.region and part.sums != (0, 0)
            if differs and part.numel == theirs.numel and theirs.moved_to(part.region) == part.sums:
                return Mismatch(each.key, rank, OTHER_RANK, f"is the part of rank {other} again")
    return each
