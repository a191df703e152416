"""Repeats the last forward pass from its recorded start, to tell a device's fault from an effect of the data.

Two repeated passes show whether the device repeats itself; the outputs of the step itself, whether it did so then.
"""

import contextlib
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from trainsentry.collectors.calls.dump_entries import EntryWriter
from trainsentry.collectors.capture import StepAgreement
from trainsentry.collectors.guard import Guard, InertWhenCopied
from trainsentry.collectors.torch.device.device import Device
from trainsentry.collectors.torch.device.registry import available_devices, known_devices
from trainsentry.collectors.torch.kept_tensors import KeptTensors, differing, first_difference
from trainsentry.collectors.torch.pass_conditions import (
    PassConditions,
    PassWitness,
    ignores_statistics,
    opaque_type,
)
from trainsentry.collectors.torch.sharding.model_names import ModelNames
from trainsentry.collectors.torch.sharding.registry import is_holder
from trainsentry.collectors.torch.tensor_capture import TensorCapture

PART: Final = "replay"


@dataclass(frozen=True)
class _Pass:
    """The start of a forward pass: inputs (by reference), random state, autocast, and collectives called so far.

    `conditions` is what the pass depends on beside them.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: KeptTensors
    conditions: PassConditions
    random: "_Random"
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    collectives: int


@dataclass
class _Runs:
    """What is known of the present repeated passes.

    `refusal`: why they say nothing about the step. `doubt`: why a difference would not. `first`: outputs of the first
    pass. `repeating`: the model that runs now, `caught` its outputs.
    """

    refusal: str | None = None
    doubt: str | None = None
    first: KeptTensors | None = None
    repeating: nn.Module | None = None
    caught: KeptTensors | None = None


class Replay:
    """Records the start and the outputs of the last forward pass, and repeats the pass.

    `collectives` returns the number of collectives that this rank has called; None when they are not counted. A forward
    pass with collectives is not repeated: other ranks would have to take part. The outputs are kept by reference until
    the next pass or the next update, whichever is first.
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
        self.runs = _Runs()
        self._outputs: KeptTensors | None = None
        self._updated = False
        self._witness = PassWitness()
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
        self._forget()
        self._witness = PassWitness()

    def _forget(self) -> None:
        self.last = self._outputs = None
        self._updated, self.runs = False, _Runs()

    # ------------------------------------------------------------------ the step's own pass

    def keep(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the start of a forward pass."""
        self._forget()
        types = [device.type for device in available_devices()]
        autocast = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in types)
        count = self.collectives() if self.collectives is not None else 0
        inputs, conditions = KeptTensors.of((*args, kwargs)), self._witness.note(model)
        self.last = _Pass(model, args, dict(kwargs), inputs, conditions, _Random.now(), autocast, count)
        self.used_collectives = False

    def passed(self, model: nn.Module, outputs: Any) -> None:
        """Keep the outputs of the pass that has ended; note whether it called a collective."""
        last = self.last
        if last is None:
            return
        if self.collectives is not None and self.collectives() != last.collectives:
            self.used_collectives = True
        if model is last.model and self._outputs is None and not self._updated:
            self._outputs = KeptTensors.of(outputs)

    def note_update(self) -> None:
        """Note that an optimizer has changed weights: what the pass computed can no longer be repeated."""
        self._updated, self._outputs = True, None

    # ------------------------------------------------------------------ repeated passes

    def obstacle(self) -> str | None:
        """Return the reason why the last forward pass cannot be repeated; None when it can."""
        last = self.last
        if last is None:
            return "no forward pass was seen"
        if any(n.fragment is not None or hasattr(n.parameter, "placements") for n in self.names.parameters):
            return "the model is sharded: other ranks would have to take part"
        if self.several_ranks and (self.used_collectives or self.collectives is None):
            return "its forward pass calls collectives: other ranks would have to take part"
        if last.inputs.replaced_or_counted((*last.args, last.kwargs)):
            return "its inputs were changed in place since"
        return None

    def run(self, modules: Collection[str], writers: Collection[EntryWriter]) -> str:
        """Repeat the forward pass once per writer, with a full dump of the named modules; return "done" or why not."""
        reason, last = self.obstacle(), self.last
        if reason is not None or last is None:
            return f"not done: {reason}"
        opaque = opaque_type((*last.args, last.kwargs))
        changes = f"its inputs have a {opaque}, whose changes cannot be seen" if opaque is not None else None
        doubt = changes or self._witness.doubt(last.model, last.conditions)
        self.runs = runs = _Runs(self._refusal(last), doubt)
        for writer in writers:
            outputs = self._repeat(last, self._dumping(modules, writer))
            runs.first = runs.first or outputs
        return "done"

    def _refusal(self, last: _Pass) -> str | None:
        """Return why the outputs of a repeated pass say nothing about the step's; None when they do."""
        step = self._outputs
        if self._updated:
            return "the weights were updated since"
        if step is None:
            return "the step's pass did not end"
        if not step.names:
            return "it returns no tensors"
        if not step.is_unchanged():
            return "its outputs were changed in place since, or changes of them cannot be seen"
        if not last.inputs.is_unchanged():
            return "its inputs were changed in place since, or changes of them cannot be seen"
        return self._witness.change(last.model, last.conditions)

    def compare_with_step(self) -> tuple[StepAgreement, str]:
        """Compare what the last `run` gave with what the step computed: how, and what differs or why not compared.

        Where they differ, the pass runs twice more as the step ran it, with gradients and without a dump: hooks and the
        absence of gradients may choose other kernels.
        """
        runs, last, step = self.runs, self.last, self._outputs
        if runs.refusal is not None or last is None or step is None or runs.first is None:
            return StepAgreement.NOT_MADE, runs.refusal or "the run was not seen"
        try:
            if first_difference(step, runs.first) is None:
                return StepAgreement.EQUAL, ""
            again = [self._repeat(last, torch.enable_grad()) for _ in range(2 if runs.doubt is None else 0)]
        except Exception as error:  # noqa: BLE001 - the user's forward pass may raise anything
            runs.doubt, again = f"{type(error).__name__}: {error}", []
        finally:
            self.runs = _Runs()
        if runs.doubt is not None:
            return (
                StepAgreement.NOT_MADE,
                f"a re-run differs from the step, which may have another reason: {runs.doubt}",
            )
        return _verdict(step, *again)

    def _repeat(self, last: _Pass, context: AbstractContextManager[Any]) -> KeptTensors | None:
        """Repeat the pass inside a context; return its outputs."""
        runs = self.runs
        with self._state_restored(last.model):
            last.random.restore()
            runs.repeating, runs.caught = last.model, None
            with contextlib.ExitStack() as stack:
                for kind, enabled, dtype in last.autocast:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
                stack.enter_context(context)
                last.model(*last.args, **last.kwargs)
        return runs.caught

    @contextlib.contextmanager
    def _dumping(self, modules: Collection[str], writer: EntryWriter) -> Iterator[None]:
        """Dump the named modules during the block, without gradients."""
        capture = TensorCapture(self.names, Guard(strict=True), checksum=True)
        with torch.no_grad(), contextlib.closing(capture):
            capture.attach(modules, writer, lambda *_: True)
            yield

    @contextlib.contextmanager
    def _state_restored(self, model: nn.Module) -> Iterator[None]:
        """Collect nothing during the block; restore the random state and the buffers after it."""
        now = _Random.now()
        buffers = [
            (module, name, buffer, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        kept, self.last = self.last, None
        try:
            with self.guard.paused():
                yield
        finally:
            self.runs.repeating = None
            self._restore(buffers)
            now.restore()
            self.last = kept

    def _restore(self, buffers: Sequence[tuple[nn.Module, str, Tensor, Tensor]]) -> None:
        """Give the modules their buffers back with their values; a change that influences outputs is a doubt."""
        runs = self.runs
        for module, name, buffer, value in buffers:
            replaced = module._buffers.get(name) is not buffer
            if replaced:
                module._buffers[name] = buffer
            changed = not torch.equal(buffer, value)  # batch norm changes them without autograd's count
            if (replaced or (changed and differing(buffer, value) is not None)) and not ignores_statistics(module):
                runs.doubt = runs.doubt or f"the pass changes the buffer {name} of a {type(module).__name__}"
            if changed:
                buffer.detach().copy_(value)


def _verdict(step: KeptTensors, again: KeptTensors | None, once_more: KeptTensors | None) -> tuple[StepAgreement, str]:
    """Return how two runs that went as the step did compare with it: two that differ from each other blame nothing."""
    try:
        if again is None or once_more is None:
            return StepAgreement.NOT_MADE, "a re-run gives no outputs"
        different = first_difference(step, again)
        if different is None:
            return StepAgreement.EQUAL, ""
        unsteady = first_difference(again, once_more)
    except ValueError as error:
        return StepAgreement.NOT_MADE, str(error)
    return (StepAgreement.DIFFERENT, different) if unsteady is None else (StepAgreement.NOT_REPEATABLE, "")


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
        if torch.compiler.is_compiling():
            return
        runs = self.owner.runs
        if runs.repeating is not None:
            if module is runs.repeating and runs.caught is None:
                runs.caught = KeptTensors.of(output)
        elif torch.is_grad_enabled():
            self.owner.guard.run(PART, self.owner.passed, module, output)
