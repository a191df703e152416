"""Launches Triton's kernels as they were compiled before, without another look at each of their arguments."""

from collections.abc import Hashable
from typing import Any


class CompiledLaunches:
    """Launches one kernel on one device.

    Triton examines all arguments of each launch to find what it has compiled for them: 29 µs on the host of an H200,
    of which 18 are saved where the caller says by `key` what of the arguments matters: dtypes, constants, and which
    whole numbers need 64 bits. Where Triton gives back nothing that can be launched, as its interpreter does, or that
    takes other arguments, it launches each time itself.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._compiled: dict[Hashable, Any] = {}
        self._takes_all = True

    def launch(self, programs: int, key: Hashable, *args: Any, **constants: Any) -> None:
        """Launch; `constants` are the kernel's last parameters, in their order."""
        compiled = self._compiled.get(key)
        if compiled is None or not self._was_launched(compiled, programs, *args, *constants.values()):
            compiled = self.kernel[(programs,)](*args, **constants)
            if self._takes_all and hasattr(type(compiled), "__getitem__"):
                self._compiled[key] = compiled

    def _was_launched(self, compiled: Any, programs: int, *args: Any) -> bool:
        """Launch what was compiled; False where it takes other arguments, for good."""
        try:
            compiled[(programs, 1, 1)](*args)
        except RuntimeError:  # the device's, or its lack of memory
            raise
        except Exception:  # noqa: BLE001 - the interface is another version's: Triton itself knows better
            self._takes_all = False
            self._compiled.clear()
        return self._takes_all


def is_wide(*numbers: int) -> bool:
    """Whether one of these numbers needs 64 bits, for which a kernel is compiled apart."""
    return max(numbers) >= 1 << 31
