"""`torch.npu` of the simulated accelerator: the functions that torch and trainsentry ask a device's module for."""

from types import SimpleNamespace

import torch

SUPPORTED = [torch.float16, torch.bfloat16]
ops = torch.ops.simulated_npu


def is_available():
    return True


def is_initialized():
    return True


def _lazy_init():
    pass


def _is_in_bad_fork():
    return False


def device_count():
    return 2


def current_device():
    return torch.accelerator.current_device_index()


def set_device(device):
    torch.accelerator.set_device_index(_index(device))


def _index(device):
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return current_device() if index is None else index


class device:
    """Makes a device current."""

    def __init__(self, device):
        self.index = _index(device)

    def __enter__(self):
        self.before = current_device()
        set_device(self.index)

    def __exit__(self, *_):
        set_device(self.before)


class Stream(torch.Stream):
    def __new__(cls, device=None, priority=0, **kwargs):
        if kwargs:
            return super().__new__(cls, priority=priority, **kwargs)
        return super().__new__(cls, torch.device("npu", _index(device)), priority=priority)


class Event(torch.Event):
    def __new__(cls, enable_timing=False, blocking=False, interprocess=False):
        return super().__new__(cls, torch.device("npu"), enable_timing=enable_timing, blocking=blocking)


def current_stream(device=None):
    return torch.accelerator.current_stream(torch.device("npu", _index(device)))


def default_stream(device=None):
    private = int(torch._C._autograd.DeviceType.PrivateUse1)
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=private)


class stream:
    """Makes a stream current."""

    def __init__(self, stream):
        self.stream = stream

    def __enter__(self):
        if self.stream is not None:
            self.before = current_stream(self.stream.device)
            torch.accelerator.set_stream(self.stream)

    def __exit__(self, *_):
        if self.stream is not None:
            torch.accelerator.set_stream(self.before)


def set_stream(stream):
    torch.accelerator.set_stream(stream)


def synchronize(device=None):
    torch.accelerator.synchronize(_index(device))


def is_current_stream_capturing():
    return ops.is_capturing()


class NPUGraph:
    """Captures nothing and replays nothing: only what a capture forbids is real."""

    def capture_begin(self, pool=None, capture_error_mode="global"):
        ops.set_capturing(True)

    def capture_end(self):
        ops.set_capturing(False)

    def replay(self):
        pass


def set_sync_debug_mode(mode):
    ops.set_sync_debug({"default": 0, "warn": 1, "error": 2}.get(mode, mode))


def get_sync_debug_mode():
    return ops.get_sync_debug()


def manual_seed(seed):
    ops.seed(current_device(), seed)


def manual_seed_all(seed):
    for i in range(device_count()):
        ops.seed(i, seed)


def get_rng_state(device="npu"):
    return ops.rng_state(_index(device))


def set_rng_state(new_state, device="npu"):
    ops.set_rng_state(_index(device), new_state)


def get_rng_state_all():
    return [get_rng_state(i) for i in range(device_count())]


def set_rng_state_all(new_states):
    for i, state in enumerate(new_states):
        set_rng_state(state, i)


def get_amp_supported_dtype():
    return SUPPORTED


def memory_allocated(device=None):
    return ops.memory_now(_index(device))


def max_memory_allocated(device=None):
    return ops.memory_peak(_index(device))


def memory_reserved(device=None):
    return ops.memory_now(_index(device))


def mem_get_info(device=None):
    return ops.memory_total() - ops.memory_now(_index(device)), ops.memory_total()


def empty_cache():
    pass


def get_device_properties(device=None):
    return SimpleNamespace(name="Simulated", total_memory=ops.memory_total(), vector_core_num=1, cube_core_num=1)


def get_device_name(device=None):
    return "Simulated"


dumps = []
"""The configurations of dumps of kernels; None where one ended."""


def init_dump():
    pass


def set_dump(cfg_file):
    dumps.append(cfg_file)


def finalize_dump():
    dumps.append(None)
