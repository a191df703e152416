"""Computes one module's call again in a sampled step, so that a device that computes wrongly shows without replicas."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from trainsentry.collectors.guard import Guard, InertWhenCopied
from trainsentry.collectors.series import RECOMPUTED, RECOMPUTED_GRADIENT, Series
from trainsentry.collectors.shared.model_graph import NamedModule
from trainsentry.collectors.torch.hooks.active_modes import changes_operations
from trainsentry.collectors.torch.hooks.backward_pass import running_node
from trainsentry.collectors.torch.hooks.compiler import backward_is_compiled
from trainsentry.collectors.torch.hooks.nested_tensors import tensors_in_call
from trainsentry.collectors.torch.passes.operation_nodes import is_python_function, may_be_hooked, operation_of
from trainsentry.collectors.torch.rows.local_tensor import are_plain, is_readable, version_of
from trainsentry.collectors.torch.rows.step_rows import StepRows

REPEATABLE: Final = frozenset(
    {
        nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm,
        nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softmax, nn.AvgPool2d, nn.MaxPool2d,
    }
)  # fmt: skip
"""Modules of torch.nn whose call depends on inputs and weights alone, and changes neither; no subclasses of them."""

PART: Final = "recompute"
"""The part of the monitor that a failure in a backward pass switches off."""

MOST_BYTES: Final = 64 * 2**20
"""Bytes of an output, or of all gradients of a call, that are computed again: twice as much memory is needed for a
moment."""

PURE: Final = (
    "Addmm", "Mm", "Convolution", "Embedding", "NativeLayerNorm", "NativeGroupNorm", "Gelu", "Silu", "Tanh", "Sigmoid",
    "Softmax", "AvgPool2D", "MaxPool2D",
)  # fmt: skip
"""How the names of the nodes of `REPEATABLE` begin, which compute from what they saved and have no effect."""

MANY_MODULES: Final = 16
"""Repeatable modules from which on gradients are computed again whenever outputs are: both are an eighth of a step's
work then, or less, at every tenth step by default. In a model of fewer it is every other time."""


REPEATS: Final = 4
"""How many more times a result is computed that came out otherwise on the host. What comes out the same is computed
only once there, so a kernel whose bits vary is met less often, and must show when it is."""

_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class RepeatedCalls:
    """Chooses one module a sampled step, in turn, and appends how many elements of its output come out otherwise.

    The same goes for the gradients that its backward pass computes. On a device both are computed twice more; on the
    host once more, and `REPEATS` times after a difference. Where these results differ from each other, the kernel is
    not repeatable by nature, and the row is NaN. Nothing waits for the device, no random number is drawn, and no graph
    is made.
    """

    def __init__(self, rows: StepRows, guard: Guard, *, enabled: bool) -> None:
        self.rows = rows
        self.guard = guard
        self.enabled = enabled
        self.generation = 0
        self._modules: list[NamedModule] = []
        self._turn = 0
        self._backward = False
        self._chosen: NamedModule | None = None
        self._call: tuple[tuple[Any, ...], dict[str, Any], list[tuple[Tensor, int | None]]] | None = None

    def choose_among(self, modules: Sequence[NamedModule]) -> None:
        """Take turns among the repeatable ones of these modules."""
        self._modules = [named for named in modules if self.enabled and type(named.module) in REPEATABLE]
        self._turn = 0

    def open_step(self, *, sampling: bool) -> None:
        """Begin a step; choose the next module in it if `sampling`."""
        self._call = self._chosen = None
        self.generation += 1
        if sampling and self._modules:
            round_, place = divmod(self._turn, len(self._modules))
            is_due = len(self._modules) >= MANY_MODULES or (round_ + place) % 2 == 1
            self._backward = is_due and self._turn > 0  # a compiled backward pass must show itself first
            self._chosen, self._turn = self._modules[place], self._turn + 1

    def close(self) -> None:
        """Compute nothing again from now on, also where a backward pass is still to come."""
        self.generation += 1
        self._call = self._chosen = None

    def enter(self, named: NamedModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Keep the inputs of the chosen module's call until it is left; none under a mode that changes operations."""
        if named is self._chosen and computes_plainly(named.module) and not changes_operations():
            inputs = [(tensor, version_of(tensor)) for _, tensor in tensors_in_call(args, kwargs)]
            self._call = args, dict(kwargs), inputs

    def leave(self, named: NamedModule, output: Any) -> None:
        """Compute the call again and compare, and have that done for its gradients once they are there."""
        if named is not self._chosen or self._call is None:
            return
        call, self._call, self._chosen = self._call, None, None
        if not isinstance(output, Tensor) or not is_readable(output) or type(output.data) is not Tensor:
            return
        if output.layout is not torch.strided or output.nbytes > MOST_BYTES or output.is_conj() or output.is_neg():
            return
        if self._backward and not backward_is_compiled():  # a hook is part of the compiled graph
            node = _repeatable_node(output)
            if node is not None:
                node.register_hook(_BackwardHook(self, self._series_of(named, RECOMPUTED_GRADIENT), self.generation))
        if all(version_of(tensor) == version for tensor, version in call[2]):
            self._repeat_call(named, output, call[0], call[1])

    def _repeat_call(self, named: NamedModule, output: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        def again() -> list[Tensor | None]:
            found = _again(named.module, args, kwargs)
            is_like = found.shape == output.shape and found.dtype == output.dtype  # else a hook made something else
            return [found if is_like else None]

        self._compare(self._series_of(named, RECOMPUTED), [output.detach()], again)

    def repeat_backward(self, series_id: int, used: Sequence[Tensor | None], arrived: Sequence[Any]) -> None:
        """Compute the running node of autograd again: `arrived` are its arguments, and `used` what it has returned."""
        node = running_node()
        if node is None or changes_operations() or not are_plain([*used, *arrived]):
            return
        if sum(x.nbytes for x in used if x is not None) > MOST_BYTES:
            return

        def again() -> list[Tensor | None]:
            found = zip(used, _as_tuple(node(*arrived)), strict=True)
            return [None if x is None or y is None else _summed_like(x, y) for x, y in found]

        with torch.no_grad():
            self._compare(series_id, used, again)

    def _series_of(self, named: NamedModule, prefix: str) -> int:
        name = f"{prefix}.{named.name}"
        series = Series(name, name, module=named.name, vpp_stage=named.vpp_stage, scalar=True)
        return self.rows.table.series_id(series)

    def _compare(
        self, series_id: int, used: Sequence[Tensor | None], again: Callable[[], Sequence[Tensor | None]]
    ) -> None:
        """Append how many elements of what the step used come out otherwise each time; None has no part in it.

        In host memory, where nothing has to be waited for, what comes out the same is not computed again.
        """
        first = again()
        pairs = [(x, y) for x, y in zip(used, first, strict=True) if x is not None and y is not None]
        if pairs and all(_is_same(x, y) for x, y in pairs):
            self.rows.add_scalar(series_id, 0.0)
        elif pairs:
            wrong = _total([_differing(x, y) for x, y in pairs])
            unlike: list[Tensor] = []
            for _ in range(REPEATS if wrong.is_cpu else 1):  # one after the other, as each takes memory
                found = zip(first, again(), strict=True)
                unlike += [_differing(y, z) for y, z in found if y is not None and z is not None]
            number = wrong.to(torch.float32)  # a program may have set another default
            self.rows.add_scalar(series_id, torch.where(_total(unlike) == 0, number, math.nan) if unlike else number)


@dataclass(slots=True)
class _BackwardHook(InertWhenCopied):
    """Has one pass through a node of autograd computed again. It may not keep the node, which keeps the hook."""

    owner: RepeatedCalls
    series_id: int
    generation: int

    def __call__(self, used: Sequence[Tensor | None], arrived: Sequence[Any]) -> None:
        if torch.compiler.is_compiling() or self.generation != self.owner.generation:
            return
        self.generation = -1
        self.owner.guard.run(PART, self.owner.repeat_backward, self.series_id, used, arrived)


def _repeatable_node(output: Tensor) -> Any:
    """Return the node of autograd that computes the gradients of a module's operation, None where it has effects.

    A hook may have made the output something else, whose node has effects (it accumulates a gradient, or calls a
    collective). What hooks of saved tensors brought back, such as a checkpoint's, they may refuse to bring back again.
    """
    node = operation_of(output)
    if node is None or is_python_function(node) or may_be_hooked():
        return None
    return node if node.name().startswith(PURE) else None


def _summed_like(x: Tensor, gradient: Tensor) -> Tensor:
    """Return a gradient as autograd passes it on: summed to the shape of what was broadcast, and cast."""
    return (gradient if gradient.shape == x.shape else gradient.sum_to_size(x.shape)).to(x.dtype)


def _as_tuple(found: Any) -> tuple[Tensor | None, ...]:
    return found if isinstance(found, tuple) else (found,)


def computes_plainly(module: nn.Module) -> bool:
    """Whether a module runs its class's own forward on weights that are whole and here."""
    if "forward" in vars(module) or getattr(module, "max_norm", None) is not None:
        return False
    weights = list(module.parameters(recurse=False))
    return all(type(w.data) is Tensor and w.numel() and not hasattr(w, "ds_id") for w in weights)


def _again(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return what a module's forward gives, without a graph and without autocast keeping its casts for the training."""
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.no_grad():
            found: Tensor = type(module).forward(module, *args, **kwargs)
    finally:
        torch.set_autocast_cache_enabled(cached)
    return found


def _differing(a: Tensor, b: Tensor) -> Tensor:
    """Return the number of elements whose bits differ: one pass over both, in which a NaN equals itself."""
    return (_bits(a) != _bits(b)).sum()


def _total(counts: list[Tensor]) -> Tensor:
    """Return the sum of whole numbers; of one, itself, as each operation here is a launch on a device."""
    return counts[0] if len(counts) == 1 else torch.stack(counts).sum()


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are known to have the same bits: never of a device, which would have to be waited for."""
    return a.is_cpu and b.is_cpu and torch.equal(_bits(a), _bits(b))


def _bits(x: Tensor) -> Tensor:
    x = torch.view_as_real(x) if x.is_complex() else x
    return x.view(_BITS[x.element_size()])
