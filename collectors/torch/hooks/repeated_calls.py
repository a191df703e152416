"""Computes one module's call again in a sampled step, so that a device that computes wrongly shows without replicas."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from trainsentry.collectors.series import RECOMPUTED, Series
from trainsentry.collectors.shared.model_graph import NamedModule
from trainsentry.collectors.torch.hooks.nested_tensors import tensors_in_call
from trainsentry.collectors.torch.rows.local_tensor import is_readable, version_of
from trainsentry.collectors.torch.rows.step_rows import StepRows

REPEATABLE: Final = frozenset(
    {
        nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm,
        nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softmax, nn.AvgPool2d, nn.MaxPool2d,
    }
)  # fmt: skip
"""Modules of torch.nn whose call depends on inputs and weights alone, and changes neither; no subclasses of them."""

MOST_BYTES: Final = 64 * 2**20
"""Bytes of an output that is computed again: twice as much memory is needed for a moment."""


class RepeatedCalls:
    """Chooses one module a sampled step, in turn, and appends how many elements of its output come out otherwise.

    The call is computed twice more. Where these two differ from each other, the kernel is not repeatable by nature, and
    the row is NaN. Nothing waits for the device, no random number is drawn, and no graph is made.
    """

    def __init__(self, rows: StepRows, *, enabled: bool) -> None:
        self.rows = rows
        self.enabled = enabled
        self._modules: list[NamedModule] = []
        self._turn = 0
        self._chosen: NamedModule | None = None
        self._call: tuple[tuple[Any, ...], dict[str, Any], list[tuple[Tensor, int | None]]] | None = None

    def choose_among(self, modules: Sequence[NamedModule]) -> None:
        """Take turns among the repeatable ones of these modules."""
        self._modules = [named for named in modules if self.enabled and type(named.module) in REPEATABLE]
        self._turn = 0

    def open_step(self, *, sampling: bool) -> None:
        """Begin a step; choose the next module in it if `sampling`."""
        self._call = self._chosen = None
        if sampling and self._modules:
            self._chosen = self._modules[self._turn % len(self._modules)]
            self._turn += 1

    def enter(self, named: NamedModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Keep the inputs of the chosen module's call until it is left."""
        if named is self._chosen and _is_plain(named.module):
            inputs = [(tensor, version_of(tensor)) for _, tensor in tensors_in_call(args, kwargs)]
            self._call = args, dict(kwargs), inputs

    def leave(self, named: NamedModule, output: Any) -> None:
        """Compute the call again, and compare."""
        if named is not self._chosen or self._call is None:
            return
        (args, kwargs, inputs), self._call, self._chosen = self._call, None, None
        if not isinstance(output, Tensor) or not is_readable(output) or type(output.data) is not Tensor:
            return
        if output.layout is not torch.strided or output.nbytes > MOST_BYTES:
            return
        if any(version_of(tensor) != version for tensor, version in inputs):
            return
        first, second = (_again(named.module, args, kwargs) for _ in range(2))
        if first.shape != output.shape or first.dtype != output.dtype:
            return  # a hook has made something else of it
        wrong = _differing(output.detach(), first).to(torch.float32)
        is_repeatable = _differing(first, second) == 0
        value = torch.where(is_repeatable, wrong, torch.full_like(wrong, float("nan")))
        name = f"{RECOMPUTED}.{named.name}"
        series = Series(name, name, module=named.name, vpp_stage=named.vpp_stage, scalar=True)
        self.rows.add_scalar(self.rows.table.series_id(series), value)


def _is_plain(module: nn.Module) -> bool:
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
    """Return the number of elements that differ; NaN equals NaN."""
    return ((a != b) & ~(a.isnan() & b.isnan())).sum()
