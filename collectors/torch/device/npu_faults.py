"""Counts what torch_npu's own checks of the hardware report: silent data corruption and faults of its memory."""

import functools
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

SILENT_CHECK: Final = "torch_npu.silent_check"
"""The logger of torch_npu's silent-data check: a warning is a finding, lower levels are its own progress."""


class NpuFaults:
    """Counts the findings of the silent-data check, and the faults of memory, from the first call of `counts` on.

    The check itself is the user's choice; its hooks, its thread and its thresholds stay as they are.
    """

    def __init__(self) -> None:
        self.silent = SilentCheck()
        self.memory = MemoryFaults()

    def counts(self, npu: Any) -> Mapping[str, int]:
        """Return the number of findings by kind since the first call; `npu` is the module `torch_npu.npu`."""
        return {"silent_check": self.silent.count(), "memory_fault": self.memory.count(npu)}

    def forget(self) -> None:
        """Stop listening, and start again from zero at the next call of `counts`."""
        self.silent.forget()
        self.memory.forget()


class SilentCheck(logging.Handler):
    """Listens to the warnings of torch_npu's silent-data check (NPU_ASD_ENABLE) from the first call of `count` on."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._count = 0
        self._count_lock = threading.Lock()
        self._listens = False

    def emit(self, record: logging.LogRecord) -> None:
        """Count a warning; torch_npu logs from a thread of its own."""
        with self._count_lock:
            self._count += 1

    def count(self) -> int:
        """Return the number of findings since the first call."""
        if not self._listens:
            logging.getLogger(SILENT_CHECK).addHandler(self)
            self._listens = True
        with self._count_lock:
            return self._count

    def forget(self) -> None:
        """Stop listening."""
        logging.getLogger(SILENT_CHECK).removeHandler(self)
        self._listens, self._count = False, 0


class MemoryFaults:
    """Counts uncorrectable errors of a device's memory (UCE).

    torch_npu raises one in the training loop and knows its addresses until the device is restarted. What recovers a
    run does both within a step: it asks `check_uce_in_memory` where the fault lies (0: there is none), and calls
    `restart_device`. These two are therefore followed; they do what they did. `check_uce_in_memory` is never called
    here, as it empties torch_npu's cache of memory.
    """

    def __init__(self) -> None:
        self._count = 0
        self._is_known = False  # the fault under way is counted
        self._followed: tuple[Any, dict[str, Any]] | None = None

    def count(self, npu: Any) -> int:
        """Return the number of faults since the first call; never waits for the device."""
        if self._followed is None:
            self._follow(npu)
        if self._has_addresses(npu):
            self._note()
        return self._count

    def forget(self) -> None:
        """Leave torch_npu's functions as they were."""
        if self._followed is not None:
            npu, functions = self._followed
            for name, function in functions.items():
                setattr(npu, name, function)
        self._count, self._is_known, self._followed = 0, False, None

    def _follow(self, npu: Any) -> None:
        makers: dict[str, Callable[[Any, Any], Any]] = {
            "check_uce_in_memory": self._with_check,
            "restart_device": self._with_restart,
        }
        functions = {name: getattr(npu, name) for name in makers if hasattr(npu, name)}
        self._followed = npu, functions
        for name, function in functions.items():
            setattr(npu, name, makers[name](npu, function))

    def _with_check(self, npu: Any, check: Any) -> Any:
        @functools.wraps(check)
        def check_uce_in_memory(*args: Any, **kwargs: Any) -> Any:
            where = check(*args, **kwargs)
            if where:
                self._note()
            return where

        return check_uce_in_memory

    def _with_restart(self, npu: Any, restart: Any) -> Any:
        @functools.wraps(restart)
        def restart_device(*args: Any, **kwargs: Any) -> Any:
            if self._has_addresses(npu):
                self._note()
            self._is_known = False
            return restart(*args, **kwargs)

        return restart_device

    def _note(self) -> None:
        self._count += not self._is_known
        self._is_known = True

    @staticmethod
    def _has_addresses(npu: Any) -> bool:
        """Whether torch_npu knows addresses of a fault; an older version cannot be asked."""
        addresses = getattr(npu, "_get_uce_addr", None)
        try:
            return addresses is not None and bool(addresses())
        except Exception:  # noqa: BLE001 - asked in the middle of a recovery, which must go on
            return False
