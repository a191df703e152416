"""The device that the demo trains on."""

from collections.abc import Sequence

import torch

from trainsentry.collectors.torch.device.registry import accelerator, device_of


def training_device(choice: str, ranks: int = 1, choices: Sequence[str] = ()) -> torch.device:
    """Return the device that `choice`, one of `choices`, means for a run of that many ranks.

    `auto` is the accelerator that torch finds, else the CPU; several ranks train on the CPU unless a device is chosen.

    Raises:
        ValueError: when the device is not there, or is there fewer times than there are ranks; it names what is there.

    """
    host = torch.device("cpu")
    if device_of(choice).on_host or (choice == "auto" and ranks > 1):
        return host
    found = accelerator()
    if choice == "auto":
        return host if found is None else torch.device(found.type)
    if found is None or found.type != choice:
        present = [each for each in choices if each in {"auto", "cpu"} or (found is not None and each == found.type)]
        raise ValueError(f"--device: this torch finds no {choice}; allowed here: {', '.join(present)}")
    count = len(found.devices())
    if ranks > count:
        raise ValueError(f"--device {choice}: {ranks} ranks need as many devices, this machine has {count}")
    return torch.device(found.type)
