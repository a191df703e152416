"""Counts how often buffers are written between two updates, without reading their values."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from operator import sub
from typing import Final, TypeVar

from torch import Tensor

from trainsentry.collectors.series import BUFFER_WRITES, Series
from trainsentry.collectors.torch.hooks.compiler import has_compiled
from trainsentry.collectors.torch.rows.step_rows import StepRows
from trainsentry.collectors.torch.sharding.model_names import ModelNames

Key = TypeVar("Key", bound=Hashable)

LEARNED: Final = 20
"""Updates after which it is known which buffers are written alike."""

MOST: Final = 1000
"""Buffers that are counted, the first of the model, some 0.2 ms of each step: the largest convolutional nets have half
of that."""


class BufferWrites:
    """Appends `buffer_writes.<buffer>` where a buffer is written more often than others that were written like it.

    torch counts writes in a tensor's version; those of its own batch norm it does not count. Buffers that were written
    equally often before each of the first updates go on together, however many passes precede an update, unless
    something else sets one of them: a stale copy, an alias, a broadcast of one buffer. The value is how many times
    more, than those, or than before where those rest; there is a row where it changes. Compiled code writes as its
    compiler likes, so beside it nothing is counted.
    """

    def __init__(self, rows: StepRows, names: ModelNames) -> None:
        self.rows = rows
        self.names = names
        self._known_of = -1
        self._buffers: list[dict[str, Tensor | None]] = []  # of each module, its own: a module may replace a buffer
        self._owners: list[tuple[str, str]] = []  # of each buffer: its module's name and its own
        self._last: list[int] = []
        self._usual: list[int] = []
        self._kinds: list[int] = []
        self._more: list[int] = []
        self._alike: list[int] = []  # how often each was written when those like it last were
        self._written: set[int] = set()
        self._updates = 0

    def read(self) -> None:
        """Count the writes since the update before."""
        if self._known_of != len(self.names.modules):
            self._begin()
        versions = self._versions()
        if versions and len(versions) != len(self._owners):  # a module has another number of buffers
            self._begin()
            versions = self._versions()
        if not versions or not self._last:
            self._last = versions
            return
        writes = list(map(sub, versions, self._last))
        self._last = versions
        if self._updates <= LEARNED:
            self._updates += 1
            self._kinds = [hash(pair) for pair in zip(self._kinds, writes, strict=True)]
            self._alike = [*writes]
        elif writes != self._usual:
            self._compare(writes)
        self._usual = writes

    def _begin(self) -> None:
        """Take the buffers of the modules that are watched now, and learn anew which are written alike."""
        self._known_of = len(self.names.modules)
        self._buffers, self._owners = [], []
        for named in self.names.modules:
            if named.module._buffers and len(self._owners) < MOST:
                self._buffers.append(named.module._buffers)
                self._owners += [(named.name, own) for own in named.module._buffers]
        self._last, self._usual, self._updates = [], [], 0
        self._kinds, self._more, self._alike = ([0] * len(self._owners) for _ in range(3))
        self._written.clear()

    def _versions(self) -> list[int]:
        """Return the version of each buffer, -1 where there is none; nothing where versions cannot be compared."""
        if has_compiled():
            return []
        try:
            return [-1 if b is None else b._version for buffers in self._buffers for b in buffers.values()]
        except RuntimeError:  # an inference tensor has no version
            return []

    def _compare(self, writes: list[int]) -> None:
        """Append the buffers whose excess over those that were written like them is another."""
        usual = _most_common(self._kinds, writes)
        self._written.update(kind for kind, count in usual.items() if count)
        names = [(kind, own) for kind, (_, own) in zip(self._kinds, self._owners, strict=True)]
        of_name, among = _most_common(names, writes), Counter(names)
        for i, count in enumerate(writes):
            of_kind, namesakes = usual[self._kinds[i]], among[names[i]]
            if count == of_kind == 0 and self._kinds[i] in self._written:
                continue  # as before an update that no rollout precedes: it says nothing
            has_like = of_kind > 0 or namesakes > 1  # else it may only begin to be used
            is_alone = namesakes == 1 or of_name[names[i]] == of_kind
            more = max(count - (of_kind or self._alike[i]), 0) if has_like and is_alone else 0
            self._alike[i] = of_kind or self._alike[i]
            if more != self._more[i]:
                self._more[i] = more
                self._append(i, more)

    def _append(self, place: int, more: int) -> None:
        module, own = self._owners[place]
        name = f"{BUFFER_WRITES}.{module}.{own}" if module else f"{BUFFER_WRITES}.{own}"
        self.rows.add_scalar(self.rows.table.series_id(Series(name, name, module=module, scalar=True)), float(more))


def _most_common(keys: Sequence[Key], writes: list[int]) -> dict[Key, int]:
    """Return the count of writes that most buffers of a key have, the least of several."""
    counts: defaultdict[Key, Counter[int]] = defaultdict(Counter)
    for key, count in zip(keys, writes, strict=True):
        counts[key][count] += 1
    return {key: min(of_key, key=lambda n: (-of_key[n], n)) for key, of_key in counts.items()}
