"""The NPU branch asks torch_npu for the right things, in both overflow modes, and for nothing before it is in use."""

import logging
import sys
from types import SimpleNamespace

import pytest
import torch
from recording_torch_npu import Graph, RecordingTorchNpu, every_call, installed

from trainsentry.collectors.guard import Guard
from trainsentry.collectors.torch import device_checks
from trainsentry.collectors.torch.device.npu import ND, Npu
from trainsentry.collectors.torch.device.registry import DeviceOverflowFlags
from trainsentry.collectors.torch.sharding.local_shards import NamedParameter

MODE = "torch.npu.utils.is_support_inf_nan"
READ, CLEAR = "torch.npu.utils.get_npu_overflow_flag", "torch.npu.utils.clear_npu_overflow_flag"


@pytest.fixture
def saturating():
    with installed(RecordingTorchNpu(inf_nan=False)) as module:
        yield module


@pytest.fixture
def inf_nan():
    with installed(RecordingTorchNpu(inf_nan=True)) as module:
        yield module


def test_in_saturation_mode_the_flag_is_read_and_cleared(saturating):
    flag = Npu().overflow_flag()
    saturating.overflowed = True
    assert flag.is_set()
    flag.clear()
    assert not flag.is_set()
    assert [name for name in saturating.names() if ".utils." in name] == [MODE, READ, CLEAR, READ]


@pytest.mark.parametrize("forced", ["0", "1"])
def test_in_inf_nan_mode_there_is_no_flag_to_read(inf_nan, monkeypatch, forced):
    """Reading it raises there, unless FORCE_OVERFLOW_CHECK is 1; Inf and NaN show in the values anyway."""
    monkeypatch.setenv("FORCE_OVERFLOW_CHECK", forced)
    assert Npu().overflow_flag() is None
    assert Npu().overflow_status(torch.device("cpu")) is None
    assert not {READ, CLEAR, "torch_npu.npu_get_float_status"} & set(inf_nan.names())


def test_the_state_of_the_flag_is_taken_without_waiting_and_cleared_after(saturating):
    saturating.overflowed = True
    status = Npu().overflow_status(torch.device("cpu"))
    assert status.item() == 1.0
    assert not saturating.overflowed
    status_calls = [(name, args[0].tolist()) for name, args, _ in saturating.calls if "float_status" in name]
    assert status_calls == [
        ("torch_npu.npu_get_float_status", [0.0] * 8),
        ("torch_npu.npu_clear_float_status", [0.0] * 8),
    ]
    assert READ not in saturating.names()  # it waits for the device


def test_flags_of_devices_are_looked_for_when_they_are_asked():
    flags = DeviceOverflowFlags()
    assert not flags.is_set()
    with installed(RecordingTorchNpu(inf_nan=False)) as module:
        module.overflowed = True
        assert flags.is_set()
        flags.clear()
        assert not flags.is_set()
    assert not flags.is_set()


def test_a_device_that_is_not_in_use_is_not_started():
    """Asking for the overflow mode, properties or random states would start it."""
    with installed(RecordingTorchNpu(inf_nan=False, initialized=False)) as module:
        npu = Npu()
        assert npu.overflow_flag() is None
        assert npu.overflow_status(torch.device("cpu")) is None
        assert npu.rng_states() == []
        assert npu.memory(torch.device("cpu")).allocated == 0
        assert not npu.is_capturing()
        assert npu.faults() == {}
        assert set(module.names()) == {"torch.npu.is_initialized"}


def test_half_a_torch_npu_is_none(monkeypatch):
    """An import that fails in the middle can leave `torch.npu` or an empty module behind."""
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace())
    monkeypatch.setattr(torch, "npu", SimpleNamespace(), raising=False)
    npu = Npu()
    assert (npu.is_available(), npu.is_in_use(), npu.devices(), npu.versions()) == (False, False, [], {})
    assert not npu.is_capturing()
    npu.seed(3)


def test_a_private_format_is_cast_and_the_tensor_left_alone(saturating):
    x, private = torch.ones(2), torch.ones(3)
    saturating.formats[id(private)] = 29
    npu = Npu()
    assert npu.in_plain_format(x) is x
    assert not npu.has_plain_format(private)
    plain = npu.in_plain_format(private)
    assert plain is not private
    casts = [(args, kwargs) for name, args, kwargs in saturating.calls if name == "torch_npu.npu_format_cast"]
    assert [(args[0] is private, args[1], kwargs) for args, kwargs in casts] == [(True, ND, {})]


def test_streams_wait_for_each_other_only_when_they_differ(saturating):
    npu, device = Npu(), torch.device("cpu")
    earlier = npu.current_stream(device)
    assert npu.follow(earlier, device) is earlier
    assert npu.follow(None, device) is earlier
    assert "torch.npu.Stream.wait_stream" not in saturating.names()
    saturating.current = 1
    assert npu.follow(earlier, device) is not earlier
    assert saturating.names()[-1] == "torch.npu.Stream.wait_stream"


def test_what_it_says_of_itself(saturating):
    npu = Npu()
    found = npu.properties(torch.device("cpu"))
    assert (found.name, found.memory_bytes, found.processors) == ("Ascend910B3", 2**36, 40)
    assert npu.versions() == {
        "torch_npu": "2.13.0", "CANN": "CANN 8.3", "RUNTIME": "RUNTIME 8.3", "HCCL": "HCCL 8.3", "DRIVER": "DRIVER 8.3"
    }  # fmt: skip
    assert npu.graph_type() is Graph
    assert (npu.collectives, npu.row_dtype) == ("hccl", torch.float32)
    assert npu.kernel_limits.most_programs == 65_535


def test_an_older_cann_that_knows_fewer_parts_is_no_error(saturating):
    def only_cann(module):
        if module != "CANN":
            raise RuntimeError("module is unknown")
        return "8.0"

    saturating.npu.utils.get_cann_version = only_cann
    assert Npu().versions() == {"torch_npu": "2.13.0", "CANN": "8.0"}


@pytest.fixture
def npu(saturating):
    """An NPU that leaves nothing behind of what it listens to."""
    made = Npu()
    yield made
    made._faults.forget()


def test_findings_of_the_silent_check_are_counted_and_its_log_is_left_as_it_was(npu, caplog):
    logger = logging.getLogger("torch_npu.silent_check")
    before = list(logger.handlers)
    assert npu.faults()["silent_check"] == 0
    with caplog.at_level(logging.INFO, "torch_npu.silent_check"):
        logger.info("[Event] a grad-norm spike may happen")
        logger.warning("[Warning] feature detection detects abnormal results!")
    assert npu.faults() == {"silent_check": 1, "memory_fault": 0}
    assert len(caplog.records) == 2
    npu._faults.forget()
    assert logger.handlers == before


ADDRESS = {"ptr": 1 << 40, "size": 64}


def test_a_fault_of_memory_that_nobody_recovers_from_counts_once(npu, saturating):
    assert npu.faults()["memory_fault"] == 0
    saturating.faulty.append(ADDRESS)
    assert [npu.faults()["memory_fault"] for _ in range(3)] == [1, 1, 1]


@pytest.mark.parametrize(("addresses", "where"), [([ADDRESS], 2), ([ADDRESS], 0), ([], 3)])
def test_faults_that_a_recovery_has_cleared_within_a_step_are_counted(npu, saturating, addresses, where):
    """Where it is asked for, or by the addresses that a restart clears; some faults have no address."""
    npu.faults()
    for count in (1, 2):
        saturating.faulty += addresses
        saturating.fault_is_in = where
        assert saturating.npu.check_uce_in_memory(0) == where
        saturating.npu.restart_device(0, rebuild_all_resources=1)
        assert saturating.faulty == []
        assert npu.faults()["memory_fault"] == count
    calls = [
        (name, args, kwargs) for name, args, kwargs in saturating.calls if "restart" in name or "check_uce" in name
    ]
    assert calls[:2] == [
        ("torch.npu.check_uce_in_memory", (0,), {}), ("torch.npu.restart_device", (0,), {"rebuild_all_resources": 1})
    ]  # fmt: skip
    assert len(calls) == 4  # each as often as the recovery called it


def test_a_rank_that_restarts_for_the_fault_of_another_one_counts_none(npu, saturating):
    npu.faults()
    assert saturating.npu.check_uce_in_memory(0) == 0
    saturating.npu.restart_device(0)
    assert npu.faults()["memory_fault"] == 0


def test_an_older_version_that_cannot_be_asked_is_no_error_and_functions_are_given_back(npu, saturating):
    restart = saturating.npu.restart_device
    del saturating.npu._get_uce_addr
    del saturating.npu.check_uce_in_memory
    assert npu.faults()["memory_fault"] == 0
    assert saturating.npu.restart_device is not restart
    npu._faults.forget()
    assert saturating.npu.restart_device is restart


def test_faults_stand_as_numbers_at_their_step(npu, saturating, monkeypatch):
    logged = []
    monkeypatch.setattr(device_checks, "device_of", lambda _: npu)
    checks = device_checks.DeviceChecks(Guard(strict=True), lambda *entry: logged.append(entry))
    parameters = [NamedParameter("weight", torch.nn.Parameter(torch.ones(1)), "", 0)]
    for step in range(4):
        if step == 2:
            saturating.faulty.append(ADDRESS)
            saturating.npu.restart_device(0)
        logged.append(step)
        checks.read(parameters)
    assert [entry for entry in logged if isinstance(entry, int) or entry[0] == "memory_fault"] == [
        0, 1, 2, ("memory_fault", 1.0, 0), 3
    ]  # fmt: skip


def test_every_function_that_the_seam_asks_torch_npu_for_is_among_the_recorded_calls():
    """So that the test against the published wheels checks all of them."""
    import inspect
    import re

    from trainsentry.collectors.torch.device import device, npu, npu_faults

    text = inspect.getsource(npu) + inspect.getsource(device)
    asked = set(re.findall(r"(?:self\.module|module|torch_npu\(\)|self\._tools|tools)\.(?:npu\.utils\.)?(\w+)\(", text))
    asked |= set(re.findall(r'getattr\(self\.module, "(\w+)"', text)) | {"npu_get_float_status"}
    of_faults = set(re.findall(r'getattr\(npu, "(\w+)"|"(\w+)": self._with', inspect.getsource(npu_faults)))
    asked |= {name for found in of_faults for name in found if name}
    recorded = {name.rpartition(".")[2] for mode in (True, False) for name, _, _ in every_call(inf_nan=mode)}
    only_elsewhere = {"get_rng_state", "set_rng_state", "manual_seed"}  # of mps, which has one device
    assert asked - only_elsewhere <= recorded
    assert {"get_npu_overflow_flag", "npu_format_cast", "set_rng_state_all", "mem_get_info"} <= recorded
    assert {"_get_uce_addr", "restart_device", "check_uce_in_memory"} <= asked
