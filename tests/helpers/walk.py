"""Follows one piece of data through the code: the files a reader opens on its way."""

import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import trainsentry
from trainsentry.monitor.recorder.link import RecorderLink
from trainsentry.monitor.recorder.start import ThreadRecorder

HOME = Path(trainsentry.__file__).parent.resolve().parent
ROOMS = ("collectors/", "anomaly/", "exporters/", "monitor/")


class Walk:
    """Collects files of ours from the call stacks of `changes`, the functions in which the data changes its form.

    Stacks are cut off above `beginnings`. Names are (file, function). `everything` has the files of all calls below
    `extents`. With `until`, the walk ends when that function returns.
    """

    def __init__(self, changes, beginnings, extents=(), until=None):
        self.changes, self.beginnings, self.extents, self.until = changes, beginnings, set(extents), until
        self.path, self.everything, self.seen = [], set(), set()
        self.on = False
        self._names, self._files = {}, {}

    @contextmanager
    def watching(self):
        """Follow the data in this thread."""
        before = sys.getprofile()
        self.on = True
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(before)

    def __call__(self, frame, event, _arg):
        if not self.on:
            return
        name = self._name(frame)
        if event == "return" and name is not None and name == self.until:
            self.on = False
        if event != "call" or name is None:
            return
        stack = []
        while frame is not None:
            if self._name(frame) is not None:
                stack.insert(0, frame)
            frame = frame.f_back
        names = [self._name(f) for f in stack]
        begins = next((i for i, n in enumerate(names) if n in self.beginnings), None)
        if begins is None:
            return
        files = [self._files[f.f_code] for f in stack[begins:]]
        if name in self.changes:
            self.seen.add(name)
            self.path = list(dict.fromkeys(self.path + files))
        if self.extents & set(names):
            self.everything.update(files)

    def _name(self, frame):
        code = frame.f_code
        if code not in self._names:
            file = self._files[code] = _our_file(code)
            self._names[code] = (Path(file).name, code.co_name) if file else None
        return self._names[code]


def _our_file(code):
    try:
        inside = Path(code.co_filename).resolve().relative_to(HOME).as_posix()
    except (OSError, ValueError):
        return None
    return inside if inside.startswith(ROOMS) else None


@contextmanager
def recorder_in_thread(patch, walk):
    """Run recorders in threads, which the walk follows too."""
    original = RecorderLink.__init__
    patch.setattr(RecorderLink, "__init__", lambda s, settings, table: original(s, settings, table, ThreadRecorder))
    threading.setprofile(walk)
    try:
        yield
    finally:
        threading.setprofile(None)


def files_of_the_walk(title):
    """Return the files that CONTRIBUTING.md lists under a walk, in its order."""
    text = (HOME / "CONTRIBUTING.md").read_text()
    table = text[text.index(f"**{title}") :].split("\n\n")[1]
    rows = [line.split("|")[1] for line in table.splitlines()[2:]]
    return [name.strip().strip("`") for row in rows for name in row.split(",")]
