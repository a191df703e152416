"""Fingerprints and settings that a checkpoint saves, and their comparison with those of a resumed run."""

import json
import time
from dataclasses import replace
from typing import Final

from trainsentry.anomaly.checkpoints.comparison import Resumed
from trainsentry.anomaly.checkpoints.rule import CheckpointRule
from trainsentry.anomaly.checkpoints.saved_fingerprints import Saved
from trainsentry.collectors.backend import Store
from trainsentry.collectors.fingerprint import Fingerprint, FingerprintReader, Key, combined
from trainsentry.collectors.guard import Guard
from trainsentry.monitor.recorder import messages
from trainsentry.monitor.recorder.link import RecorderLink

PART: Final = "fingerprints"

MOST_RANKS: Final = 64
"""Ranks whose fingerprints are put together: each reads those of all others when a sharded model is saved."""

GATHER_SECONDS: Final = 5.0
"""Seconds for which fingerprints of other ranks are waited for: ranks that save or train together are not far apart."""

POLL_SECONDS: Final = 0.02

PASSES: Final = 4
"""Forward passes before the first update at which buffers are read: an earlier pass may come before they are loaded."""


class CheckpointCheck:
    """Gives checkpoints their fingerprints, and compares them before the first update after a resume.

    `reader` is None where nothing is read: then every method does nothing. `store` connects all ranks, None where each
    judges itself. `link` takes what differs to the recorder.
    """

    def __init__(
        self,
        reader: FingerprintReader | None,
        store: Store | None,
        guard: Guard,
        link: RecorderLink,
        *,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self._reader = reader
        self._store = store if world <= MOST_RANKS else None
        self._guard = guard
        self._link = link
        self._rank = rank
        self._world = world
        self._last: Saved | None = None
        self._resumed: Saved | None = None
        self._buffers: dict[Key, Fingerprint] = {}
        self._passes = 0
        self._counts = {"saved": 0, "loaded": 0}

    # ------------------------------------------------------------------ saving

    def save(self, step: int) -> str:
        """Return the fingerprints of the tensors as they are now, with those of the last checkpoints, as a text."""
        return self._guard.run(PART, self._save, step) or ""

    def _save(self, step: int) -> str:
        if self._reader is None:
            return ""
        parts = {part.key: part for part in self._reader.read()}
        saved = Saved(step, self._rank, self._world, parts, settings=self._reader.settings(last_step=True))
        if self._store is not None and any(part.region for part in parts.values()):
            saved = replace(saved, wholes=self._sums_of_wholes(saved))
        self._last = saved if self._last is None else self._last.followed_by(saved)
        return self._last.to_text()

    def _sums_of_wholes(self, saved: Saved) -> dict[Key, tuple[int, int]]:
        """Return the sums of the whole tensors that ranks share; none where a rank does not save with the others."""
        ranks = [Saved.from_text(text) for text in self._gathered("saved", saved.step, saved.to_text()).values()]
        if len(ranks) < self._world:
            self._store = None
            self._guard.warn_once(
                PART,
                "not all ranks call state_dict() together, so checkpoints have fingerprints of each rank's own shards "
                "only",
            )
            return {}
        wholes = {}
        for key, part in saved.parts.items():
            parts = [other.parts[key] for other in ranks if other is not None and key in other.parts]
            whole = combined(parts) if part.region else None
            if whole is not None:
                wholes[key] = whole.sums
        return wholes

    # ------------------------------------------------------------------ resuming

    def load(self, text: str) -> None:
        """Compare with these fingerprints before the next update."""
        self._guard.run(PART, self._load, text)

    def _load(self, text: str) -> None:
        if self._reader is None:
            return
        try:
            self._resumed = Saved.from_text(text)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            self._resumed = None
            self._guard.warn_once(PART, f"the fingerprints of the checkpoint cannot be read: {error}")
        self._last = self._resumed
        self._buffers, self._passes = {}, 0
        if self._resumed is not None:
            self._reader.at_next_passes(self._take_buffers)

    def _take_buffers(self, found: list[Fingerprint]) -> bool:
        """Take the buffers before a forward pass; return whether to go on, as some are not what was saved."""
        self._passes += 1
        if self._resumed is None:
            return False
        odd = False
        for buffer in found:
            saved = self._resumed.parts.get(buffer.key)
            fits = saved is not None and saved.sums == buffer.sums
            odd |= not fits
            if fits or buffer.key not in self._buffers:
                self._buffers[buffer.key] = buffer
        return odd and self._passes < PASSES

    def before_update(self, step: int, *, complete: bool) -> None:
        """At the first update after a resume, compare; `complete`: every optimizer is known."""
        if self._resumed is not None:
            saved, self._resumed = self._resumed, None
            self._guard.run(PART, self._compare, step, saved, complete)

    def _compare(self, step: int, saved: Saved, complete: bool) -> None:
        if self._reader is None:
            return
        self._reader.end_passes()
        seen = bool(self._buffers)
        found = {part.key: part for part in self._reader.read(buffers=not seen)} | self._buffers
        alone = self._world > 1 and self._store is None
        settings = self._reader.settings(last_step=False)
        mine = Resumed(self._rank, self._world, saved, found, not seen or alone, complete, settings)
        ranks = {self._rank: mine} if self._world == 1 or alone else self._of_all_ranks(step, mine)
        if ranks:
            differ = [anomaly.to_json() for anomaly in CheckpointRule.judge(step, ranks)]
            if differ:
                self._link.send(messages.MISMATCHES, anomalies=differ)

    def _of_all_ranks(self, step: int, mine: Resumed) -> dict[int, Resumed]:
        """Return what the ranks have loaded; nothing on ranks other than 0, which judges all."""
        now = Saved(mine.saved.step, self._rank, self._world, mine.found, settings=mine.settings)
        text = json.dumps([mine.saved.to_text(), now.to_text(), mine.buffers_moved, mine.complete])
        texts = self._gathered("loaded", step, text, wait=self._rank == 0)
        return {rank: self._resumed_on(rank, text) for rank, text in texts.items()} if self._rank == 0 else {}

    def _resumed_on(self, rank: int, text: str) -> Resumed:
        saved, now, moved, complete = json.loads(text)
        before, after = Saved.from_text(saved), Saved.from_text(now)
        if before is None or after is None:
            raise ValueError(f"rank {rank} has fingerprints of another version")
        return Resumed(rank, self._world, before, after.parts, moved, complete, after.settings)

    # ------------------------------------------------------------------ between ranks

    def _gathered(self, what: str, step: int, text: str, *, wait: bool = True) -> dict[int, str]:
        """Store this rank's text; return those of the ranks that have stored theirs as often, waiting a while for all.

        A text begins with the numbers of the exchange and its step, so that no text of an earlier one is taken for it.
        """
        store = self._store
        self._counts[what] += 1
        mark = f"{self._counts[what]}@{step} "
        prefix = f"{PART}/{what}"
        if store is None:
            return {self._rank: text}
        store.put(f"{prefix}/{self._rank}", mark + text)
        end = time.monotonic() + (GATHER_SECONDS if wait else 0.0)
        while True:
            found = {rank: other for rank, other in store.all(prefix).items() if other.startswith(mark)}
            if len(found) == self._world or time.monotonic() >= end:
                return {rank: other.removeprefix(mark) for rank, other in found.items()}
            time.sleep(POLL_SECONDS)
