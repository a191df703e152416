"""Level L0 for compiled graphs: taps in cells write files as the graph runs, and a step's files become its dump."""

import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import mindspore as ms
import numpy as np
from mindspore import Tensor

from trainsentry.collectors.calls.call import Call
from trainsentry.collectors.mindspore.calls.call_dump import CallDump, stem_of
from trainsentry.collectors.mindspore.calls.graph_taps import tap, untap
from trainsentry.collectors.mindspore.runtime import rank_and_world_size
from trainsentry.collectors.shared.model_graph import NamedModule
from trainsentry.collectors.shared.private_files import make_private_folder

TREE: Final = "graph"
"""Folder of the dumps of compiled graphs, next to those of PyNative steps."""

QUIET_SECONDS: Final = 0.1
"""A step's files are complete when none has arrived for this long: MindSpore writes them asynchronously."""

LONGEST_SECONDS: Final = 30.0
"""How long to wait for a step's files."""

_FILE: Final = re.compile(
    r"(?P<call>.+\.(?P<direction>forward|backward))\.@\.(?P<side>input|output)\.(?P<place>\d+)"
    r"_\w+?_(?P<number>\d+)\.npy"
)
"""Name of a dumped file; TensorDump appends the dtype and a number that increases in the order of writing."""

_KEYS: Final = {
    ("forward", "input"): "input_args",
    ("forward", "output"): "output",
    ("backward", "input"): "input",
    ("backward", "output"): "output",
}


class GraphDump(CallDump):
    """Reads the files that the graph has written in a step, at the step's end and in the graph's order.

    A cell is tapped before it is compiled and so writes at every step; files of steps that are not dumped are deleted.
    """

    tree = TREE
    _arriving = Path()

    def prepare(self, named: Iterable[NamedModule], dump_path: str) -> None:
        """Tap each selected cell once."""
        self._arriving = Path(dump_path).absolute() / TREE / "arriving" / f"rank{rank_and_world_size()[0]}"
        make_private_folder(self._arriving)  # the graph's files in it have the umask's mode
        for module in named:
            call = Call(stem_of(module), 0, is_module=True)
            if id(module.module) not in self._named and any(
                self.selection.may_begin(call, direction) for direction in ("forward", "backward")
            ):
                self._named[id(module.module)] = module
                tap(module.module, str(self._arriving / stem_of(module)))

    def release(self) -> None:
        """Remove every tap."""
        for module in self._named.values():
            untap(module.module)
        self._named.clear()

    def start(self, named: Iterable[NamedModule], *, window: bool = False) -> None:
        """Begin recording: delete earlier files, so that later ones belong to the step."""
        del named, window
        self.running = True
        self._delete(self._settled())

    def stop(self) -> None:
        """End recording, and dump the files that have arrived."""
        if self.running:
            self.running = False
            self.guard.run(self.part, self._take_arrived)

    def reset(self) -> None:
        """Begin the next step."""
        super().reset()
        if self._named:  # in steps that are not dumped, files still to come are not waited for
            self.guard.run(self.part, self._delete, list(self._arriving.glob("*.npy")))

    def _delete(self, paths: list[Path]) -> None:
        for path in paths:
            path.unlink(missing_ok=True)

    def _settled(self) -> list[Path]:
        """Wait until no more files arrive; return those of the step."""
        if not self._named:
            return []
        ms.runtime.synchronize()
        end, known = time.monotonic() + LONGEST_SECONDS, -1
        while time.monotonic() < end:
            found = list(self._arriving.glob("*.npy"))
            if len(found) == known:
                return found
            known = len(found)
            time.sleep(QUIET_SECONDS)
        return found

    def _take_arrived(self) -> None:
        matched = [(path, found) for path in self._settled() if (found := _FILE.fullmatch(path.name))]
        # A gradient that is a constant of the graph is written first.
        matched.sort(key=lambda item: (item[1]["direction"] == "backward", int(item[1]["number"])))
        times: Counter[str] = Counter()
        calls: dict[tuple[str, int], dict[tuple[str, int], Path]] = defaultdict(dict)
        for path, found in matched:
            place = f"{found['call']}.{found['side']}.{found['place']}"
            calls[found["call"], times[place]][found["side"], int(found["place"])] = path
            times[place] += 1
        made = Counter(name for name, _ in calls)
        for (name, turn), files in calls.items():
            self._write_call(name, turn, files, made)
        self._numbers.update({name: count for name, count in made.items() if name.endswith(".forward")})
        self._delete([path for path, _ in matched])

    def _write_call(self, name: str, turn: int, files: dict[tuple[str, int], Path], made: Counter[str]) -> None:
        stem, _, direction = name.rpartition(".")
        # The backward passes of a cell's calls run in reverse order.
        turn = turn if direction == "forward" else max(made[f"{stem}.forward"], made[name]) - 1 - turn
        first = self._numbers[f"{stem}.forward"]
        call = Call(stem, first + turn, is_module=True)
        call.recorded = self.selection.begins(call, direction)
        if call.recorded and self.writer is not None:
            whole = call.name(direction)
            self.writer.parent(whole, self._parent_of(stem, direction, turn, made))
            content: dict[str, Any] = {"input_args": [], "input_kwargs": {}} if direction == "forward" else {}
            for side in ("input", "output"):
                if self._reads(side):
                    places = {place: path for (of, place), path in files.items() if of == side}
                    content[_KEYS[direction, side]] = [
                        self._taken(places.get(i), f"{whole}.{side}.{i}") for i in range(max(places, default=-1) + 1)
                    ]
            self._write(whole, content, ("input_args",) if direction == "forward" else ("input",))
        self.selection.ends(call, direction)

    def _taken(self, path: Path | None, stem: str) -> Any:
        return None if path is None else self._take(Tensor(np.load(path, allow_pickle=False)), stem)

    def _parent_of(self, stem: str, direction: str, turn: int, made: Counter[str]) -> str | None:
        """Return the containing cell's call; of several calls, the one that the call's turn falls into."""
        own = next((m.name for m in self._named.values() if stem_of(m) == stem), "")
        containing = [m for m in self._named.values() if own.startswith(f"{m.name}.")]
        if not containing:
            return None
        parent = stem_of(max(containing, key=lambda m: len(m.name)))
        calls, inside = made[f"{parent}.forward"], made[f"{stem}.forward"]
        number = turn * calls // inside if inside else 0
        return Call(parent, number, is_module=True).name(direction)
