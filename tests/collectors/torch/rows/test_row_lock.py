"""Threads of several devices add rows at once, and each row is that of its own series."""

import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

import trainsentry
from trainsentry.collectors.series import Series, SeriesTable
from trainsentry.collectors.shared import host_rows
from trainsentry.collectors.statistics import MEAN
from trainsentry.collectors.torch.rows.row_lock import ADDING, keep_threads_apart
from trainsentry.collectors.torch.rows.step_rows import StepRows

THREADS, ROWS = 4, 400


@pytest.fixture
def eager_switching():
    """Let the interpreter change threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_rows_of_several_threads_are_those_of_their_series(eager_switching):
    table = SeriesTable()
    rows = StepRows(table, device_rows_on_cpu=True)
    keep_threads_apart(rows)
    start, failures = threading.Barrier(THREADS), []
    series = [[table.series_id(Series(f"{t}.{i}", "gradient")) for i in range(ROWS)] for t in range(THREADS)]

    def work(thread):
        ids = series[thread]
        kept = [torch.full((3,), float(1000 * thread + i)) for i in range(ROWS)]
        start.wait()
        try:
            for i, (series_id, x) in enumerate(zip(ids, kept, strict=True)):
                if i % 4 == 3:
                    rows.add_many([series_id], [x])
                else:
                    (rows.add, rows.add_shared, rows.add_scalar)[i % 4](series_id, x if i % 4 < 2 else x[0])
        except Exception as error:  # noqa: BLE001 - shown by the test
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    ids, _, values = rows.take().resolve()
    assert len(ids) == THREADS * ROWS
    named = [tuple(map(int, table.series[i].name.split("."))) for i in ids]
    assert [1000 * thread + i for thread, i in named] == values[:, MEAN].tolist()


def test_several_devices_bring_the_lock_before_any_backward_pass_and_one_does_without(tmp_path):
    rows = StepRows(SeriesTable(), device_rows_on_cpu=True)
    rows.add(0, torch.ones(3))
    assert not set(ADDING) & (vars(rows).keys() - {"add_shared"})
    rows._rows_on(torch.device("meta"))
    assert set(ADDING) <= vars(rows).keys()

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    config = {"output_dir": str(tmp_path), "collect": {"activations": False}}
    with trainsentry.TrainMonitor(config).watch(model) as monitor:
        assert set(ADDING) <= vars(monitor._loop.watch.rows).keys(), "the host is a device too"


def test_room_that_two_threads_make_at_once_is_never_smaller_than_it_is_said_to_be(monkeypatch):
    """The second thread has decided on fewer rows before the first one was done, and is done before it."""
    rows = StepRows(SeriesTable())
    make, hurries = host_rows.new_counts, [True]

    def interrupted(size):
        if hurries.pop():
            hurries.append(False)
            rows._make_host(300)
        return make(size)

    monkeypatch.setattr(host_rows, "new_counts", interrupted)
    rows._make_host(5000)
    address, size = rows._place_of_rows[:2]
    assert [len(host) for host, _ in rows._made if host.ctypes.data == address] == [size]
    with pytest.raises(IndexError):
        rows._place(4990, 20)


UNLOCKED = """
import sys, threading
import torch
from trainsentry.collectors.series import SeriesTable
from trainsentry.collectors.torch.rows.step_rows import StepRows

torch.set_num_threads(1)
sys.setswitchinterval(1e-6)
many = [torch.ones(7) for _ in range(50)]

def work(number, rows):
    for turn in range(20):
        try:
            for i in range(20):
                rows.add_shared(1_000 + i % 5, torch.ones(3 + (number + turn + i) % 2))
            rows.add_many([*range(50)], many)
        except (IndexError, ValueError):
            pass  # rows of several threads without a lock are mixed up

for _ in range(60):
    rows = StepRows(SeriesTable(), refused=lambda error: None)
    threads = [threading.Thread(target=work, args=(number, rows)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""
"""Three threads add 4,200 rows to each of 60 buffers, which grow four times, of tensors that change their shapes."""


def test_threads_without_the_lock_never_end_the_process():
    """A forward pass in a thread of the user's has no lock: rows may be wrong then, but no memory is."""
    found = subprocess.run([sys.executable, "-c", UNLOCKED], capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stderr
