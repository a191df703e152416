"""Compares what a resumed run is set to with what it was set to when its checkpoint was saved."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from trainsentry.anomaly.checkpoints.comparison import Resumed
from trainsentry.anomaly.finding import DATA
from trainsentry.collectors.run_settings import (
    AUTOCAST,
    CLASS,
    CONSTANT,
    INPUT,
    MODE,
    OPERATIONS,
    OPTIMIZER,
    PASSES,
    SOFTWARE,
    TRAINED,
    WRAPPED,
    WRITES,
    Settings,
)

LEAST_CHANGE: Final = math.log(1.2)
"""Smallest change of a constant, |log ratio|: a schedule, as of dropout, moves by less from one step to the next."""

OF_THE_RANK: Final = frozenset({INPUT, PASSES, OPERATIONS, WRITES})
"""Settings that differ between the stages of a pipeline, and that programs choose by the number of ranks."""

NOT_OF_MODULES: Final = frozenset({INPUT, PASSES, OPTIMIZER, OPERATIONS, WRITES, WRAPPED})
"""Settings that leave the operations of modules as they are; what any other changes, operations follow."""

NOT_OF_GRADIENTS: Final = frozenset({CONSTANT, MODE, OPERATIONS, WRITES})
"""Settings that leave the number of writes of a gradient as it is; what any other changes, the number follows."""

MOST_SHOWN: Final = 3
"""Operations that a sentence names on each side."""

TRAINING: Final = "training"
"""The quantity of a change that concerns no tensor."""


@dataclass(frozen=True, slots=True)
class SettingChange:
    """A setting that is another than when the checkpoint was saved, alike at all its `names`, in words."""

    what: str
    names: tuple[str, ...]
    rank: int
    words: str

    @property
    def quantity(self) -> str:
        """What an anomaly of it is about."""
        return {INPUT: DATA, OPTIMIZER: OPTIMIZER}.get(self.what, TRAINING)


def setting_changes(ranks: Mapping[int, Resumed]) -> list[SettingChange]:
    """Return what is set otherwise on any rank; what is alike on several ranks is said of the lowest.

    Only what both runs know is compared, so that a run of another version, or with more layers, is no change.
    """
    found: dict[str, SettingChange] = {}
    for rank in sorted(ranks):
        resumed = ranks[rank]
        changes: dict[tuple[str, Any, Any], list[str]] = {}
        of_rank = list(_changes(resumed.saved.settings, resumed.settings))
        left_out = {SOFTWARE, WRAPPED} if resumed.is_own else {SOFTWARE, WRAPPED, *OF_THE_RANK}
        kinds = {CONSTANT if what.startswith(CONSTANT) else what for what, *_ in of_rank}
        if kinds - NOT_OF_MODULES:
            left_out.add(OPERATIONS)
        if kinds - NOT_OF_GRADIENTS:
            left_out.add(WRITES)
        for what, name, was, now in of_rank:
            if what not in left_out:
                changes.setdefault((what, was, now), []).append(name)
        for (what, was, now), names in changes.items():
            words = f"{_words(what, names, was, now)} when step {resumed.saved.step} was saved"
            found.setdefault(words, SettingChange(what, tuple(names), rank, words))
    return list(found.values())


def _changes(saved: Settings, now: Settings) -> Iterator[tuple[str, str, Any, Any]]:
    """Yield each setting that differs: its kind, its name, and both values."""
    for what, before in saved.items():
        after = now.get(what, {})
        if what in {OPTIMIZER, PASSES, AUTOCAST} and before.keys() != after.keys():
            continue  # optimizers, or models, of another number do not correspond
        for name, was in before.items():
            if name not in after or (what == WRITES and set(after[name].split()) <= set(was.split())):
                continue  # a run's first update may differ from its later ones
            if not _are_alike(was, after[name]):
                yield what, name, was, after[name]


def _are_alike(was: Any, now: Any) -> bool:
    if was == now:
        return True
    if isinstance(was, (bool, str)) or isinstance(now, (bool, str)):
        return False
    if not (math.isfinite(was) and math.isfinite(now)):
        return math.isnan(was) and math.isnan(now)
    return was * now > 0 and abs(math.log(now / was)) <= LEAST_CHANGE


_WORDS: Final = {
    OPTIMIZER: "the optimizer is {now}, and was {was}",
    AUTOCAST: "autocast is {now}, and was {was}",
    PASSES: "a step has {now} forward passes, and had {was}",
    INPUT: "the model's {name} is {now}, and was {was}",
    MODE: "{modules} is in {now} mode, and was in {was} mode",
    CLASS: "{modules} is a {now}, and was a {was}",
}
"""What is said of a setting."""

_FROZEN, _THAWED = "requires no gradient, and did", "requires a gradient, and did not"


def _words(what: str, names: list[str], was: Any, now: Any) -> str:
    if what == TRAINED:
        return f"{_listed('parameter', names)} {_THAWED if now else _FROZEN}"
    modules = _listed("module", names)
    if what == OPERATIONS:
        return f"{modules} computes otherwise ({_difference(was, now)}) than"
    if what == WRITES:
        return _written(was, now)
    if what in _WORDS:
        return _WORDS[what].format(name=names[0], modules=modules, was=was, now=now)
    return f"{what.removeprefix(CONSTANT)} of {modules} is {now:.6g}, and was {was:.6g}"


def _written(was: str, now: str) -> str:
    """Return how often gradients are written now, and were; and what makes the difference.

    >>> _written("1 2", "0")
    'gradients are written 0 times before an update (as where clipping is left out), and were 1 or 2 times'
    """
    before, after = ([int(count) for count in text.split()] for text in (was, now))
    fewer = max(after) < min(before)
    reason = "as where clipping is left out" if fewer else "as where clipping is added, or gradients are kept"
    was_times, now_times = (" or ".join(map(str, c)) + (" time" if c == [1] else " times") for c in (before, after))
    return f"gradients are written {now_times} before an update ({reason}), and were {was_times}"


def _difference(was: str, now: str) -> str:
    """Return which operations are new, and which are gone.

    >>> _difference("add 1, gelu 1", "add 1, relu 1")
    'with relu, without gelu'
    """
    before, after = (Counter({n: int(c) for n, _, c in (o.partition(" ") for o in t.split(", "))}) for t in (was, now))
    parts = (("with", after - before), ("without", before - after))
    return ", ".join(f"{word} {', '.join(list(names)[:MOST_SHOWN])}" for word, names in parts if names)


def _listed(kind: str, names: list[str]) -> str:
    """Return the first name, and how many others there are.

    >>> _listed("module", ["a.drop", "b.drop", "c.drop"])
    'module a.drop (and 2 others)'
    """
    first = f"{kind} {names[0]}" if names[0] else "the model"
    others = len(names) - 1
    return f"{first} (and {others} other{'s' * (others > 1)})" if others else first
