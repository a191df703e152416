"""Makes a call again without a trace in the training.

MindSpore forgets the forward pass that it is recording when any operation is refused (2.10): the backward pass then
fails. And its kernels keep the state of their random numbers for themselves. So a call is made again only while nothing
is recorded, and under a watch that stops it before a kernel that draws, communicates or writes.
"""

import random
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor
from mindspore.common.api import _pynative_executor as _executor
from mindspore.utils import MsDispatchMode

from trainsentry.collectors.calls.benchmark_task import LeftOutError
from trainsentry.collectors.calls.call import Call
from trainsentry.collectors.mindspore.calls.free_benchmark.perturbations import bits_of, of_bits
from trainsentry.collectors.mindspore.calls.operations import RANDOM_KERNELS
from trainsentry.collectors.mindspore.hooks.function_patches import unwatch_compiled, watch_compiled
from trainsentry.collectors.mindspore.hooks.gradient_hooks import FLOATS
from trainsentry.collectors.mindspore.runtime import wait
from trainsentry.collectors.shared.nested import mapped, objects_in, objects_in_call

_STOPPED: Final = (
    ("that draw random numbers", RANDOM_KERNELS),
    (
        "that communicate",
        re.compile(
            r"(Inner|Dist)Comm\w+|All(Reduce|Gather)\w*|ReduceScatter\w*|Broadcast|All[tT]o[aA]ll\w*|Send|Receive|Barrier"
            r"|Collective\w+|NeighborExchange\w*|\w*ISendIRecv\w*"
        ),
    ),
    (
        "that change tensors",
        re.compile(
            r"Assign\w*|Inplace\w+|\w*Apply\w+|\w*Adam\w*|\w*Momentum\w*|SGD|LARSUpdate"
            r"|Scatter(Nd)?(Update|Add|Sub|Mul|Div|Max|Min)"
        ),
    ),
)
"""Kernels that a repetition must not run, with the words for the calls that need them."""

_BUFFERS: Final = re.compile(r"(Sync)?Batch_?Norm\w*|batch_norm|Instance_?Norm\w*|instance_norm", re.IGNORECASE)
"""Operations that change buffers among their arguments although their name does not say so."""


_DRAWS_IN_PLACE: Final = re.compile(r"(bernoulli|cauchy|exponential|geometric|log_normal|normal|random|uniform)_")


def draws_in_place(stem: str) -> bool:
    """Whether an operation fills its argument with random numbers."""
    return _DRAWS_IN_PLACE.fullmatch(stem.rpartition(".")[2]) is not None


def changes_buffers(stem: str) -> bool:
    """Whether an operation may write into some of its arguments.

    >>> changes_buffers("Primitive.BatchNorm"), changes_buffers("Functional.layer_norm")
    (True, False)
    """
    return _BUFFERS.fullmatch(stem.rpartition(".")[2]) is not None


@dataclass
class OriginalCall:
    """A call as it was made: its arguments, or copies where it `writes` into them.

    `inputs` and `outputs` are its tensors with checksums of their bytes; they tell whether they are still as they were.
    `arrived` has the gradients of its backward pass, by "input" or "output" and the tensor's path.
    """

    call: Call
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    writes: bool
    inputs: list[tuple[Tensor, int]]
    outputs: list[tuple[Tensor, int]] = field(default_factory=list)
    gradients: list[tuple[Tensor, int]] = field(default_factory=list)
    arrived: dict[str, dict[str, Tensor]] = field(default_factory=lambda: {"input": {}, "output": {}})

    @property
    def results(self) -> list[Tensor]:
        """The results of the call."""
        return [tensor for tensor, _ in self.outputs]

    def returned(self, output: Any) -> None:
        """Take the result of the call; a call without one has changed its first argument."""
        found = [self.inputs[0][0]] if output is None and self.inputs else tensors_in(output)
        self.outputs = [(tensor, checksum(tensor)) for tensor in found]

    def take_gradient(self, group: str, path: str, gradient: Tensor) -> None:
        """Take the first gradient at a tensor of "input" or "output"."""
        if path not in self.arrived[group]:
            wait()
            self.arrived[group][path] = gradient
            self.gradients.append((gradient, checksum(gradient)))

    def check_intact(self, *, outputs: bool) -> None:
        """Check that nothing has changed the tensors since.

        Raises:
            LeftOutError: when something has.

        """
        if not self.writes and any(checksum(tensor) != known for tensor, known in self.inputs):
            raise LeftOutError("whose arguments have changed since")
        if any(checksum(tensor) != known for tensor, known in self.gradients):
            raise LeftOutError("whose gradients have changed since")
        if outputs and any(checksum(tensor) != known for tensor, known in self.outputs):
            raise LeftOutError("whose results have changed since")


def remember(
    call: Call, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], *, writes: bool
) -> OriginalCall:
    """Take down a call before it is made."""
    inputs = [(tensor, checksum(tensor)) for tensor in tensors_in((args, kwargs))]
    if writes:
        args, kwargs = mapped((args, dict(kwargs)), _copied)
    return OriginalCall(call, function, args, kwargs, writes, inputs)


def forward_again(original: OriginalCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Make a call again with these arguments.

    Raises:
        LeftOutError: when it needs a kernel that must not run again.
        Exception: what the operation raises.

    """
    if original.writes:
        args, kwargs = mapped((args, dict(kwargs)), _copied)
    with _restored(), nullcontext() if original.writes else _Watch():
        output = original.function(*args, **kwargs)
        wait()
    return tensors_in((args, kwargs))[:1] if output is None else tensors_in(output)


def backward_again(
    original: OriginalCall, args: tuple[Any, ...], kwargs: Mapping[str, Any], gradients: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return the gradients at a call's arguments, by path; `gradients` are those at its results, by path.

    Raises:
        As `forward_again`.

    """
    leaves: dict[int, Tensor] = {}
    paths: dict[str, int] = {}
    for path, tensor in objects_in_call(args, kwargs, Tensor):
        if path in original.arrived["input"] and tensor.dtype in FLOATS:
            leaves.setdefault(id(tensor), tensor)
            paths[path] = id(tensor)
    received: list[Tensor] = []

    def forward(*given: Tensor) -> tuple[Tensor, ...]:
        of = dict(zip(leaves, given, strict=True))
        again_args, again_kwargs = mapped((args, dict(kwargs)), lambda value: of.get(id(value), value))
        output = original.function(*again_args, **again_kwargs)
        found = [(t, gradients[path]) for path, t in objects_in(output, Tensor) if path in gradients]
        received.extend(g if g.dtype == t.dtype else g.astype(t.dtype) for t, g in found)
        return tuple(t for t, _ in found)

    forward_again(original, args, kwargs)  # under the watch, which must not stop a pass that is recorded
    with _restored():
        try:
            _, backward = ms.vjp(forward, *leaves.values())
            found = dict(zip(leaves, backward(tuple(received)), strict=True))
            wait()
        except BaseException:
            _executor.clear_res()  # or the half-recorded pass would spoil the training's next one
            raise
    return {path: found[key] for path, key in paths.items()}


class _Watch(MsDispatchMode):  # type: ignore[misc]
    """Stops a repetition before a kernel that must not run again.

    Calls that write are not watched: under a dispatch mode an operation in place makes a new tensor (MindSpore 2.10).
    """

    def __ms_dispatch__(self, func: Any, args: Any, kwargs: Any = None) -> Any:
        for reason, kernels in _STOPPED:
            if kernels.fullmatch(str(func.name)):
                raise LeftOutError(reason)
        return func(*args, **(kwargs or {}))


@contextmanager
def _restored() -> Iterator[None]:
    """Restore afterwards all random states that Python can reach; refuse compiled functions, which no watch sees."""
    seeds = sys.modules["mindspore.common.seed"]._KERNEL_SEED
    before, state, pythons = dict(seeds), ms.get_rng_state(), random.getstate()
    numpys = np.random.get_state()  # noqa: NPY002 - MindSpore draws from the global one
    watch_compiled(_refuse)
    try:
        yield
    finally:
        unwatch_compiled(_refuse)
        seeds.clear()
        seeds.update(before)
        ms.set_rng_state(state)
        np.random.set_state(numpys)  # noqa: NPY002
        random.setstate(pythons)


def _refuse(*_: Any) -> Any:
    raise LeftOutError("that run compiled functions")


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of nested values, in their order."""
    return [tensor for _, tensor in objects_in(value, Tensor)]


def checksum(tensor: Tensor) -> int:
    """Return a checksum of a tensor's bytes."""
    return zlib.crc32(np.ascontiguousarray(tensor.asnumpy()).tobytes())


def _copied(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    copy = of_bits(bits_of(value).copy(), value) if value.dtype in FLOATS else Tensor(value.asnumpy().copy())
    return Parameter(copy, name=value.name) if isinstance(value, Parameter) else copy
