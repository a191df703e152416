"""What a forward pass depends on beside its inputs and random numbers, and whether a model still has it."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from trainsentry.collectors.torch.device.registry import known_devices
from trainsentry.collectors.torch.hooks.compiler import has_compiled, is_compiled
from trainsentry.collectors.torch.kept_tensors import SAMPLED, are_equal, copies_of, few_of, is_plain, state_of

_FORWARDS_THAT_IGNORE_STATISTICS: Final = (_BatchNorm.forward, _InstanceNorm.forward, nn.SyncBatchNorm.forward)
"""Those of torch: in training mode they update the running statistics and compute without them."""

_KEEP_STATE_ELSEWHERE: Final = ("transformer_engine",)
"""Packages whose modules compute by a context around the call, or by what earlier calls left behind (fp8 scales)."""

_SETTINGS: Final = (
    "_get_math_sdp_enabled",
    "_get_flash_sdp_enabled",
    "_get_mem_efficient_sdp_enabled",
    "_get_cudnn_sdp_enabled",
    "_get_sdp_priority_order",
    "_get_mkldnn_enabled",
    "_len_torch_function_stack",
    "_len_torch_dispatch_stack",
)
"""Functions of `torch._C` that a context around the forward pass may change; a version may lack one."""

SAMPLED_OF_A_BUFFER: Final = 65_536
"""Elements of a buffer that are copied: a pass may set only a few, as entries of a codebook; most have fewer."""

_OF_EVERY_MODULE: Final = frozenset(vars(nn.Module()))
"""Attributes of `nn.Module` itself: parameters, buffers and hooks."""

_PLAIN: Final = (bool, int, float, str, type(None))
_MISSING: Final = object()
_LEAVES: Final = (*_PLAIN, complex, bytes, torch.dtype, torch.device, torch.Size, slice, range, Enum, Tensor)


@dataclass(frozen=True)
class PassConditions:
    """Weights, buffers, modes, settings and attributes at the start of a forward pass.

    `states` are address and version of each weight and buffer, `few` copies of some of their elements: a fused
    optimizer, and what goes through `.data`, changes no version. `plain` tells whether all of this is known.
    """

    states: tuple[tuple[int, int], ...]
    few: tuple[Tensor, ...]
    plain: bool
    modes: tuple[bool, ...]
    settings: tuple[Any, ...]
    attributes: tuple[dict[str, Any], ...]


class PassWitness:
    """Notes the conditions of a model's forward passes; says whether they are as they were."""

    def __init__(self) -> None:
        self._views: tuple[tuple[int, ...], list[Tensor]] = ((), [])

    def note(self, model: nn.Module) -> PassConditions:
        """Return the present conditions, without waiting for a device."""
        modules = list(model.modules())
        held = [tensor for module in modules for tensor in _influences(module)]
        plain = all(is_plain(tensor) for tensor in held)
        states = tuple((t.data_ptr(), t._version) for t in held) if plain else ()
        few = copies_of(self._few(held, states)) if plain else ()
        modes = tuple(module.training for module in modules)
        return PassConditions(states, few, plain, modes, _settings(), _attributes(modules))

    def _few(self, held: list[Tensor], states: tuple[tuple[int, int], ...]) -> list[Tensor]:
        """Return the views of the elements to copy; they are made anew only when a tensor has another address."""
        addresses = tuple(address for address, _ in states)
        if self._views[0] != addresses:
            sizes = [SAMPLED if isinstance(tensor, nn.Parameter) else SAMPLED_OF_A_BUFFER for tensor in held]
            self._views = (addresses, list(map(few_of, held, sizes)))
        return self._views[1]

    def change(self, model: nn.Module, then: PassConditions) -> str | None:
        """Return why the weights or buffers may be others than at the start of a pass; None when nothing shows it."""
        now = self.note(model)
        if not then.plain or not now.plain:
            return "changes of its weights cannot be seen"
        if now.states != then.states or not are_equal(now.few, then.few):
            return "weights or buffers were changed since the pass began"
        return None

    def doubt(self, model: nn.Module, then: PassConditions) -> str | None:
        """Return why a repeated pass may compute in another way than the first; None when nothing is known."""
        modules = dict(model.named_modules())
        if tuple(module.training for module in modules.values()) != then.modes:
            return "modules were switched between training and evaluation since"
        if _settings() != then.settings:
            return "settings of torch were changed since"
        if has_compiled() or any(map(is_compiled, modules.values())):
            return "torch.compile is at work, and may fuse a re-run in another way"
        packages = {type(module).__module__.partition(".")[0] for module in modules.values()}
        found = next((name for name in _KEEP_STATE_ELSEWHERE if name in packages), None)
        if found is not None:
            return f"modules of {found} depend on more than their inputs"
        for name, now, before in zip(modules, _attributes(list(modules.values())), then.attributes, strict=True):
            for key in now:
                if now[key] != before.get(key, _MISSING):
                    return f"{'.'.join(filter(None, (name, key)))} was changed since the pass began"
        return None


def _influences(module: nn.Module) -> Iterator[Tensor]:
    """Yield the weights and buffers that influence a module's outputs."""
    yield from (p for p in module._parameters.values() if p is not None)
    if not ignores_statistics(module):
        yield from (b for b in module._buffers.values() if b is not None)


def ignores_statistics(module: nn.Module) -> bool:
    """Whether a normalization computes without the running statistics that its forward pass updates."""
    if not isinstance(module, _NormBase) or not module.training or "forward" in vars(module):
        return False
    return type(module).forward in _FORWARDS_THAT_IGNORE_STATISTICS


def _attributes(modules: Sequence[nn.Module]) -> tuple[dict[str, Any], ...]:
    """Return of each module what its attributes, those of the user's class, refer to; no tensor is kept alive."""
    return tuple(
        {name: _identity(value) for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
        for module in modules
    )


def _identity(value: Any) -> Any:
    """Return what tells another value in an attribute, or one that was changed: containers are looked into once."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor):
        return id(value), state_of(value)
    if isinstance(value, (dict, list, tuple, set, deque)):
        return id(value), tuple(map(id, value.values() if isinstance(value, dict) else value))
    return id(value)


def opaque_type(value: Any, depth: int = 4) -> str | None:
    """Return the type of an argument whose changes nothing shows, such as an object of a class; None without one."""
    if isinstance(value, _LEAVES):
        return None
    if depth and isinstance(value, Mapping):
        return next((found for v in value.values() if (found := opaque_type(v, depth - 1))), None)
    if depth and isinstance(value, (tuple, list)):
        return next((found for v in value if (found := opaque_type(v, depth - 1))), None)
    return type(value).__name__


def _settings() -> tuple[Any, ...]:
    """Return torch's settings that decide which kernels run and how."""
    found = [getattr(torch._C, name, lambda: None)() for name in _SETTINGS]
    own = torch.get_default_dtype(), torch.get_num_threads(), torch.get_deterministic_debug_mode()
    return (*found, *own, *(device.kernel_settings() for device in known_devices() if device.is_in_use()))
