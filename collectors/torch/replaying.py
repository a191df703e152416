"""Repeats the last forward pass from its recorded start, to tell a device's fault from an effect of the data."""

import contextlib
import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from trainsentry.collectors.calls.dump_entries import EntryWriter
from trainsentry.collectors.guard import Guard, InertWhenCopied
from trainsentry.collectors.torch.device.device import Device
from trainsentry.collectors.torch.device.registry import available_devices, known_devices
from trainsentry.collectors.torch.hooks.nested_tensors import list_tensors
from trainsentry.collectors.torch.rows.local_tensor import version_of
from trainsentry.collectors.torch.sharding.model_names import ModelNames
from trainsentry.collectors.torch.sharding.registry import is_holder
from trainsentry.collectors.torch.tensor_capture import TensorCapture

PART: Final = "replay"


@dataclass(frozen=True)
class _Pass:
    """The start of a forward pass: inputs (by reference), random state, autocast, and collectives called so far."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    versions: tuple[int | None, ...]
    random: "_Random"
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    collectives: int


class Replay:
    """Records the start of the last forward pass, and repeats the pass.

    `collectives` returns the number of collectives that this rank has called; None when they are not counted. A forward
    pass with collectives is not repeated: other ranks would have to take part.
    """

    def __init__(
        self, names: ModelNames, guard: Guard, collectives: Callable[[], int] | None, *, several_ranks: bool
    ) -> None:
        self.names = names
        self.guard = guard
        self.collectives = collectives
        self.several_ranks = several_ranks
        self.last: _Pass | None = None
        self.used_collectives = False
        self._handles: list[Any] = []
        for chunk in names.chunks:
            inner = next(m for m in chunk.modules() if not is_holder(m))
            self._handles.append(inner.register_forward_pre_hook(_Keep(self), with_kwargs=True))
            self._handles.append(inner.register_forward_hook(_Passed(self)))

    def close(self) -> None:
        """Remove the hooks, and forget the last pass."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.last = None

    def keep(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the start of a forward pass."""
        versions = tuple(version_of(t) for t in list_tensors((*args, *kwargs.values())))
        types = [device.type for device in available_devices()]
        autocast = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in types)
        count = self.collectives() if self.collectives is not None else 0
        self.last = _Pass(model, args, dict(kwargs), versions, _Random.now(), autocast, count)
        self.used_collectives = False

    def note_collectives(self) -> None:
        """Note whether the forward pass that has ended called a collective."""
        if self.last is not None and self.collectives is not None and self.collectives() != self.last.collectives:
            self.used_collectives = True

    def obstacle(self) -> str | None:
        """Return the reason why the last forward pass cannot be repeated; None when it can."""
        last = self.last
        if last is None:
            return "no forward pass was seen"
        if any(n.fragment is not None or hasattr(n.parameter, "placements") for n in self.names.parameters):
            return "the model is sharded: other ranks would have to take part"
        if self.several_ranks and (self.used_collectives or self.collectives is None):
            return "its forward pass calls collectives: other ranks would have to take part"
        if tuple(version_of(t) for t in list_tensors((*last.args, *last.kwargs.values()))) != last.versions:
            return "its inputs were changed in place since"
        return None

    def run(self, modules: Collection[str], writers: Collection[EntryWriter]) -> str:
        """Repeat the forward pass once per writer, with a full dump of the named modules; return "done" or why not."""
        reason, last = self.obstacle(), self.last
        if reason is not None or last is None:
            return f"not done: {reason}"
        for writer in writers:
            with self._state_restored(last.model):
                self._once(last, modules, writer)
        return "done"

    def _once(self, last: _Pass, modules: Collection[str], writer: EntryWriter) -> None:
        capture = TensorCapture(self.names, Guard(strict=True), checksum=True)
        last.random.restore()
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for kind, enabled, dtype in last.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            stack.callback(capture.close)
            capture.attach(modules, writer, lambda *_: True)
            last.model(*last.args, **last.kwargs)

    @contextlib.contextmanager
    def _state_restored(self, model: nn.Module) -> Iterator[None]:
        """Collect nothing during the block; restore the random state and the buffers after it."""
        now = _Random.now()
        buffers = [(b, b.detach().clone()) for b in model.buffers()]
        kept, self.last = self.last, None
        try:
            with self.guard.paused():
                yield
        finally:
            with torch.no_grad():
                for buffer, value in buffers:
                    if not torch.equal(buffer, value):  # batch norm changes its buffers without autograd's count
                        buffer.copy_(value)
            now.restore()
            self.last = kept


@dataclass(frozen=True)
class _Random:
    """The state of every source of random numbers."""

    devices: tuple[tuple[Device, list[Tensor]], ...]
    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> "_Random":
        devices = tuple((device, device.rng_states()) for device in known_devices())
        return cls(devices, random.getstate(), np.random.get_state())  # noqa: NPY002 - scripts draw from it

    def restore(self) -> None:
        for device, states in self.devices:
            device.restore_rng_states(states)
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002


class _Keep(InertWhenCopied):
    __slots__ = ("owner",)

    def __init__(self, owner: Replay) -> None:
        self.owner = owner

    def __call__(self, module: Any, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.owner.guard.run(PART, self.owner.keep, module, args, kwargs)


class _Passed(InertWhenCopied):
    __slots__ = ("owner",)

    def __init__(self, owner: Replay) -> None:
        self.owner = owner

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.owner.guard.run(PART, self.owner.note_collectives)
