"""Counts how often buffers are written between two updates, without reading their values."""

from collections import Counter
from typing import Final

from torch import nn

from trainsentry.collectors.series import BUFFER_WRITES, Series
from trainsentry.collectors.torch.hooks.compiler import has_compiled
from trainsentry.collectors.torch.rows.step_rows import StepRows
from trainsentry.collectors.torch.sharding.model_names import ModelNames

LEARNED: Final = 20
"""Updates after which it is known which buffers are written alike."""


class BufferWrites:
    """Appends `buffer_writes.<buffer>` where a buffer is written more often than others that were written like it.

    torch counts writes in a tensor's version; those of its own batch norm it does not count. Buffers that were written
    equally often before each of the first updates go on together, however many passes precede an update, unless
    something else sets one of them: a stale copy, an alias, a broadcast of one buffer. The value is how many times
    more, and there is a row where it changes. Compiled code writes as its compiler likes, so beside it nothing is
    counted.
    """

    def __init__(self, rows: StepRows, names: ModelNames) -> None:
        self.rows = rows
        self.names = names
        self._known_of = -1
        self._owners: list[tuple[str, str, nn.Module]] = []
        self._last: list[int] = []
        self._usual: list[int] = []
        self._kinds: list[int] = []
        self._more: list[int] = []
        self._written: set[object] = set()
        self._updates = 0

    def read(self) -> None:
        """Count the writes since the update before."""
        if self._known_of != len(self.names.modules):
            self._begin()
        versions = self._versions()
        if len(versions) != len(self._last):
            self._restart(versions)
            return
        writes = [now - before for now, before in zip(versions, self._last, strict=True)]
        self._last = versions
        if self._updates <= LEARNED:
            self._updates += 1
            self._kinds = [hash(pair) for pair in zip(self._kinds, writes, strict=True)]
        elif writes != self._usual:
            self._compare(writes)
        self._usual = writes

    def _begin(self) -> None:
        """Take the buffers of the modules that are watched now."""
        self._known_of = len(self.names.modules)
        held = [(named.name, named.module) for named in self.names.modules if named.module._buffers]
        self._owners = [(name, own, module) for name, module in held for own in module._buffers]
        self._restart([])

    def _restart(self, versions: list[int]) -> None:
        self._last, self._usual, self._updates = versions, [], 0
        self._kinds, self._more = [0] * len(versions), [0] * len(versions)
        self._written.clear()

    def _versions(self) -> list[int]:
        """Return the version of each buffer, -1 where there is none; nothing where versions cannot be compared."""
        if has_compiled():
            return []
        try:
            held = [module._buffers.get(own) for _, own, module in self._owners]
            return [-1 if buffer is None else buffer._version for buffer in held]
        except RuntimeError:  # an inference tensor has no version
            return []

    def _compare(self, writes: list[int]) -> None:
        usual = _most_common(self._kinds, writes)
        self._written.update(kind for kind, count in usual.items() if count)
        names = [(kind, own) for kind, (_, own, _) in zip(self._kinds, self._owners, strict=True)]
        of_name, among = _most_common(names, writes), Counter(names)
        for i, count in enumerate(writes):
            if count == usual[self._kinds[i]] == 0 and self._kinds[i] in self._written:
                continue  # as before an update that no rollout precedes: it says nothing
            has_like = usual[self._kinds[i]] > 0 or among[names[i]] > 1  # else it may only begin to be used
            alike = among[names[i]] == 1 or of_name[names[i]] == usual[self._kinds[i]]
            more = max(count - usual[self._kinds[i]], 0) if has_like and alike else 0
            if more != self._more[i]:
                self._more[i] = more
                self._append(i, more)

    def _append(self, place: int, more: int) -> None:
        module, own, _ = self._owners[place]
        buffer = f"{module}.{own}" if module else own
        series = Series(f"{BUFFER_WRITES}.{buffer}", f"{BUFFER_WRITES}.{buffer}", module=module, scalar=True)
        self.rows.add_scalar(self.rows.table.series_id(series), float(more))


def _most_common(keys: list[object] | list[int] | list[tuple[int, str]], writes: list[int]) -> dict[object, int]:
    """Return the count of writes that most buffers of a key have, the least of several."""
    counts: dict[object, Counter[int]] = {}
    for key, count in zip(keys, writes, strict=True):
        counts.setdefault(key, Counter())[count] += 1
    return {key: min(of_key, key=lambda n: (-of_key[n], n)) for key, of_key in counts.items()}
