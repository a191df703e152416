"""The device that the demo trains on."""

import torch


def training_device(choice: str, ranks: int = 1) -> torch.device:
    """Return the device that `choice` (`auto`, `cpu`, `cuda` or `npu`) means for a run of that many ranks.

    `auto` is the accelerator that torch finds, else the CPU; several ranks train on the CPU unless a device is chosen.

    Raises:
        ValueError: when the device is not there, or is there fewer times than there are ranks; it names what is there.

    """
    if choice == "cpu" or (choice == "auto" and ranks > 1):
        return torch.device("cpu")
    found = accelerator()
    if choice == "auto":
        return found or torch.device("cpu")
    if found is None or found.type != choice:
        raise ValueError(f"--device: this torch finds no {choice}; allowed here: {', '.join(_present(found))}")
    count = torch.accelerator.device_count()
    if ranks > count:
        raise ValueError(f"--device {choice}: {ranks} ranks need as many devices, this machine has {count}")
    return found


def accelerator() -> torch.device | None:
    """Return the accelerator that torch finds on this machine; None when there is none."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def _present(found: torch.device | None) -> list[str]:
    """Return the choices that this machine has; another accelerator than those named is reached by `auto`."""
    return ["auto", "cpu", *([found.type] if found is not None and found.type in {"cuda", "npu"} else [])]
