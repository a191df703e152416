"""A pool of ranks for many tests: it makes one process group and runs functions on every rank."""

import contextlib
import importlib
import multiprocessing
import multiprocessing.connection
import os
import socket
import sys
import time
import traceback

import pytest

HANG_SECONDS = 900
"""After this long a rank hangs, however busy the machine: DeepSpeed alone takes half a minute to begin."""

PRELOADED = (
    "torch.distributed.fsdp", "torch._dynamo",
    "trainsentry.collectors.torch.watch", "trainsentry.monitor.trainer.wiring",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # its engine imports it last, and with it the whole compiler
)  # fmt: skip
"""What ranks import, where it is installed: several seconds, once. One process does it, and each rank is its fork."""

GRACE_SECONDS = 120
"""How long the other ranks may take once one has failed: they may wait for it in a collective."""


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def _start_method():
    """Return how ranks start: forked by a process without threads that has imported the frameworks, or from nothing."""
    if sys.platform != "linux" or "TRAINSENTRY_TEST_DEVICE" in os.environ:  # a device's runtime survives no fork
        return multiprocessing.get_context("spawn")
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", *PRELOADED])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")  # DeepSpeed asks when it is imported
        forkserver.ensure_running()
    return context


def _init_gloo(rank, size):
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=rank, world_size=size)


def _serve(rank, size, port, path, pipe, init, recorders):
    sys.path[:0] = [p for p in path if p not in sys.path]
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        GROUP_WORLD_SIZE="1",
        DS_ACCELERATOR="cpu",
        OMP_NUM_THREADS="1",
    )
    import torch

    torch.set_num_threads(1)
    init(rank, size)
    with recorders():
        while (task := pipe.recv()) is not None:
            module, name, args, kwargs = task
            try:
                pipe.send((True, getattr(importlib.import_module(module), name)(*args, **kwargs)))
            except BaseException as error:  # noqa: BLE001 - what a training loop raises is a result
                pipe.send((False, (type(error).__name__, str(error), traceback.format_exc())))
    os._exit(0)  # groups that a test has left behind are not waited for


OF_TORCH = "'Stream' object has no attribute 'record_event'"
"""What fully_shard of torch 2.6 says on the CPU."""


class RankFailure(AssertionError):
    def __init__(self, rank, kind, message, trace):
        super().__init__(f"rank {rank}: {kind}: {message}\n{trace}")
        self.rank, self.kind, self.message = rank, kind, message


class RankPool:
    """Processes of one process group. A function is named by its module, so that every rank imports it.

    `init(rank, size)` makes the process group: of gloo, unless another function is given. `recorders()` decides how
    recorders start while the ranks live: as they do for users, unless it is given.
    """

    def __init__(self, size, init=_init_gloo, recorders=contextlib.nullcontext):
        self.size = size
        self.pipes, self.processes = [], []
        self._init, self._recorders = init, recorders

    def _start(self):
        context = _start_method()
        port = free_port()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            args = (rank, self.size, port, sys.path, theirs, self._init, self._recorders)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def outcomes(self, function, *args, timeout=HANG_SECONDS, per_rank=None, **kwargs):
        """Run `function` on every rank; return (succeeded, result or error) of each.

        Ranks of which one has died or hangs are ended, and the next call starts new ones.
        """
        if not self.processes:
            self._start()
        found = [None] * self.size
        for rank, pipe in enumerate(self.pipes):
            extra = {} if per_rank is None else per_rank(rank)
            try:
                pipe.send((function.__module__, function.__name__, args, {**kwargs, **extra}))
            except OSError:
                raise self._death(rank, found) from None
        end = time.monotonic() + timeout
        while None in found:
            waiting = [rank for rank in range(self.size) if found[rank] is None]
            ready = multiprocessing.connection.wait([self.pipes[r] for r in waiting], end - time.monotonic())
            if not ready:
                self.close()
                raise RankFailure(waiting[0], "TimeoutError", f"no answer within {timeout} s", _failures(found))
            for rank in map(self.pipes.index, ready):
                try:
                    found[rank] = self.pipes[rank].recv()
                except (EOFError, ConnectionResetError):
                    raise self._death(rank, found) from None
            if any(f is not None and not f[0] for f in found):
                end = min(end, time.monotonic() + GRACE_SECONDS)
        if any(not done and OF_TORCH in result[1] for done, result in found):
            pytest.skip("fully_shard of this torch (2.6) does not train on the CPU, watched or not")
        return found

    def _death(self, rank, found):
        process = self.processes[rank]
        process.join(GRACE_SECONDS)
        self.close()
        return RankFailure(rank, "EOFError", f"the process has died, exit code {process.exitcode}", _failures(found))

    def run(self, function, *args, **kwargs):
        """Run `function` on every rank; return the results, in the order of ranks."""
        found = self.outcomes(function, *args, **kwargs)
        for rank, (succeeded, result) in enumerate(found):
            if not succeeded:
                raise RankFailure(rank, *result)
        return [result for _, result in found]

    def close(self):
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            with contextlib.suppress(OSError):
                pipe.send(None)
            process.join(2)
            if process.is_alive():
                process.kill()
        self.pipes, self.processes = [], []


def _failures(found):
    """Return what the ranks that have failed say."""
    return "\n".join(f"rank {r}: {f[1][1]}\n{f[1][2]}" for r, f in enumerate(found) if f and not f[0])
