"""A `torch_npu` that records each call with its arguments, in INF/NAN or in saturation mode, without a device."""

import os
import sys
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace

import torch

UNSUPPORTED = "Unsupported api when soc_version >= Ascend910B1, please use npu_check_overflow"
"""What torch_npu says in INF/NAN mode."""


class Graph:
    """Stands for torch_npu's captured graph."""

    def capture_begin(self, pool=None, capture_error_mode="global"):
        """Begin."""

    def capture_end(self):
        """End."""

    def replay(self):
        """Replay."""


class Stream:
    """A stream that records what it waits for."""

    def __init__(self, calls):
        self._calls = calls

    def wait_stream(self, stream):
        self._calls.append(("torch.npu.Stream.wait_stream", (stream,), {}))


class RecordingTorchNpu:
    """Functions return what torch_npu's would; `calls` has the name, the positional and the keyword arguments.

    `overflowed` is the state of the flag; `formats` maps the id of a tensor to its format. `faulty` are
    the addresses of a fault of memory, and `fault_is_in` is what `check_uce_in_memory` says of it.
    """

    def __init__(self, *, inf_nan, initialized=True, devices=2):
        self.calls = []
        self.inf_nan = inf_nan
        self.initialized = initialized
        self.overflowed = False
        self.formats = {}
        self.faulty = []
        self.fault_is_in = 0
        self.streams = [Stream(self.calls), Stream(self.calls)]
        self.current = 0
        self.devices = devices
        self.npu = self._npu()
        self.__version__ = "2.13.0"

    def _recorded(self, name, result=None):
        def call(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            return result(*args, **kwargs) if callable(result) else result

        return call

    def _npu(self):
        of_module = {
            "is_available": True,
            "is_initialized": lambda: self.initialized,
            "device_count": lambda: self.devices,
            "device": lambda _: nullcontext(),
            "stream": lambda _: nullcontext(),
            "set_device": None,
            "current_stream": lambda _: self.streams[self.current],
            "synchronize": None,
            "is_current_stream_capturing": False,
            "get_device_properties": SimpleNamespace(name="Ascend910B3", total_memory=2**36, vector_core_num=40),
            "manual_seed_all": None,
            "get_rng_state_all": lambda: [torch.zeros(16, dtype=torch.uint8) for _ in range(self.devices)],
            "set_rng_state_all": None,
            "memory_allocated": 5,
            "max_memory_allocated": 7,
            "memory_reserved": 8,
            "mem_get_info": (100, 200),
            "_get_uce_addr": lambda: list(self.faulty),
            "check_uce_in_memory": lambda _: self.fault_is_in,
            "init_dump": None,
            "set_dump": self.dump_begins,
            "finalize_dump": self.dump_ends,
            "restart_device": lambda *_, **__: self.faulty.clear(),
        }
        of_utils = {
            "is_support_inf_nan": lambda: self.inf_nan,
            "get_npu_overflow_flag": self._flag,
            "clear_npu_overflow_flag": self._clear,
            "get_cann_version": lambda module: f"{module} 8.3",
        }
        functions = {name: self._recorded(f"torch.npu.{name}", result) for name, result in of_module.items()}
        utils = {name: self._recorded(f"torch.npu.utils.{name}", result) for name, result in of_utils.items()}
        return SimpleNamespace(__name__="torch_npu.npu", NPUGraph=Graph, utils=SimpleNamespace(**utils), **functions)

    def dump_begins(self, path):
        """Dump kernels as a file says: there are none."""

    def dump_ends(self):
        """End the dump."""

    def _flag(self):
        if self.inf_nan and os.environ.get("FORCE_OVERFLOW_CHECK") != "1":
            raise RuntimeError(UNSUPPORTED)
        return self.overflowed

    def _clear(self):
        self.overflowed = False

    def get_npu_format(self, *args, **kwargs):
        self.calls.append(("torch_npu.get_npu_format", args, kwargs))
        return self.formats.get(id(args[0]), 2)

    def npu_format_cast(self, *args, **kwargs):
        self.calls.append(("torch_npu.npu_format_cast", args, kwargs))
        return args[0].clone()

    def npu_get_float_status(self, *args, **kwargs):
        self.calls.append(("torch_npu.npu_get_float_status", args, kwargs))
        return torch.full((8,), float(self.overflowed))

    def npu_clear_float_status(self, *args, **kwargs):
        self.calls.append(("torch_npu.npu_clear_float_status", args, kwargs))
        self.overflowed = False
        return torch.zeros(8)

    def names(self):
        """Return the names that were called, in order."""
        return [name for name, _, _ in self.calls]


@contextmanager
def installed(module):
    """Let `torch_npu` and `torch.npu` be this module."""
    before, known = sys.modules.get("torch_npu"), getattr(torch, "npu", None)
    sys.modules["torch_npu"], torch.npu = module, module.npu
    try:
        yield module
    finally:
        if before is None:
            del sys.modules["torch_npu"]
        else:
            sys.modules["torch_npu"] = before
        if known is None:
            del torch.npu
        else:
            torch.npu = known


def every_call(*, inf_nan):
    """Return all calls that the seam makes of torch_npu, for one overflow mode."""
    from trainsentry.collectors.torch.device.npu import Npu

    with installed(RecordingTorchNpu(inf_nan=inf_nan)) as module:
        npu, device = Npu(), torch.device("cpu")
        with suppress(RuntimeError):  # without the real one torch knows no device of this name
            npu.devices()
        npu.properties(device)
        npu.versions()
        private = torch.ones(2)
        module.formats[id(private)] = 29
        npu.in_plain_format(private)
        npu.make_current(device)
        with npu.guard(device):
            earlier = npu.current_stream(device)
        with npu.on_stream(earlier):
            pass
        module.current = 1
        npu.follow(earlier, device)
        npu.synchronize(device)
        npu.is_capturing()
        flag = npu.overflow_flag()
        if flag is not None:
            flag.clear()
            flag.is_set()
        npu.overflow_status(torch.device("cpu"))
        npu.faults()
        module.npu.check_uce_in_memory(0)
        module.npu.restart_device(0)
        npu._faults.forget()
        kernels = npu.kernel_dump()
        kernels.begin(Path("kernel_config_0.json"))
        kernels.end()
        npu.seed(3)
        npu.restore_rng_states(npu.rng_states())
        npu.memory(device)
        return module.calls
