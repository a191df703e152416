"""The whole examination: which checks there are for a device, in their order, and the file that they make."""

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trainsentry.monitor.doctor.check import Check, attempt, without_secrets
from trainsentry.monitor.doctor.machine import facts, machine_checks

if TYPE_CHECKING:
    from trainsentry.collectors.torch.device.device import Device


LAUNCH: Final = "check what the launcher sets (MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE) and the ranks' network"
"""The advice where the ranks cannot be joined."""


class UnknownDeviceError(ValueError):
    """The device that was asked for is none that the framework knows."""


def examine(device_name: str) -> Iterator[Check]:
    """Yield the checks as they are made.

    Raises:
        UnknownDeviceError: for a device that the framework does not know.

    """
    yield from attempt("machine", machine_checks)
    if find_spec("torch") is not None:
        yield from _examine_torch(device_name)
    elif find_spec("mindspore") is not None:
        yield from _examine_mindspore(device_name)


def _examine_mindspore(device_name: str) -> Iterator[Check]:
    from trainsentry.monitor.doctor.mindspore_device import TARGETS, choose, device_checks
    from trainsentry.monitor.doctor.mindspore_training import training_checks

    if device_name not in TARGETS:
        raise UnknownDeviceError(f"--device: got {device_name!r}; allowed: {', '.join(TARGETS)}")
    missing = choose(device_name)
    if missing is not None:
        yield missing
        return
    yield from attempt("device", device_checks)
    yield from attempt("training", training_checks)


def _examine_torch(device_name: str) -> Iterator[Check]:
    from trainsentry.collectors.torch.device.registry import known_devices
    from trainsentry.monitor.doctor.torch_device import AUTO, chosen_device, device_checks
    from trainsentry.monitor.doctor.torch_ranks import launched_ranks
    from trainsentry.monitor.doctor.torch_training import training_checks

    device = chosen_device(device_name)
    if device is None:
        names = ", ".join([AUTO, *(d.type for d in known_devices())])
        raise UnknownDeviceError(f"--device: got {device_name!r}; allowed: {names}")
    if launched_ranks() > 1 and device.is_available():
        yield from _examine_ranks(device)
        return
    yield from attempt("device", lambda: device_checks(device))
    if device.is_available():
        yield from attempt("training", lambda: training_checks(device))


def _examine_ranks(device: "Device") -> Iterator[Check]:
    """Examine the device and the ranks; one that cannot be joined or left is a finding like others."""
    from trainsentry.monitor.doctor.torch_device import device_checks
    from trainsentry.monitor.doctor.torch_ranks import joined, rank_checks

    with contextlib.ExitStack() as group:
        refused = [
            replace(each, advice=LAUNCH)
            for each in attempt("joining the ranks", lambda: _entered(group, joined(device)))
        ]
        yield from refused
        yield from attempt("device", lambda: device_checks(device))
        if not refused:
            yield from attempt("ranks", lambda: rank_checks(device))
        yield from attempt("leaving the ranks", lambda: _left(group))


def _entered(group: contextlib.ExitStack, joined: contextlib.AbstractContextManager[None]) -> tuple[Check, ...]:
    group.enter_context(joined)
    return ()


def _left(group: contextlib.ExitStack) -> tuple[Check, ...]:
    group.close()
    return ()


def write_report(path: Path, device_name: str, checks: list[Check]) -> None:
    """Write the examination as JSON: versions, switches and the table, without names of hosts, users or folders.

    Raises:
        OSError: when the file cannot be written.

    """
    table = [{key: without_secrets(text) for key, text in asdict(check).items()} for check in checks]
    content: dict[str, Any] = {
        "schema": 1,
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": device_name,
        **facts(),
        "checks": table,
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
