"""The torch side of the debugger: makes its tasks, watchers and probes, and meets the other ranks."""

import functools
import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from trainsentry.collectors.calls.call_selection import TokenRange
from trainsentry.collectors.calls.gradient_summary import GradientSummary
from trainsentry.collectors.guard import Guard, InertWhenCopied
from trainsentry.collectors.shared.model_graph import NamedModule
from trainsentry.collectors.torch import environment
from trainsentry.collectors.torch.accuracy.call_functions import names_an_operation, operation_names
from trainsentry.collectors.torch.calls.call_names import CallNames, risk_of
from trainsentry.collectors.torch.calls.call_watcher import CallWatcher
from trainsentry.collectors.torch.calls.dump_task import DumpTask
from trainsentry.collectors.torch.calls.free_benchmark.call_benchmark import CallBenchmark
from trainsentry.collectors.torch.calls.grad_probe import ModelGradientProbe
from trainsentry.collectors.torch.calls.kernels.kernel_call_dump import KernelCallDump
from trainsentry.collectors.torch.calls.kernels.kernel_request import kernel_request
from trainsentry.collectors.torch.calls.overflow_task import OverflowTask, nonfinite
from trainsentry.collectors.torch.calls.run_ut.accuracy_task import AccuracyTask
from trainsentry.collectors.torch.calls.saved_variables import SavedVariables
from trainsentry.collectors.torch.calls.tensor_facts import TensorFacts
from trainsentry.collectors.torch.device.registry import DeviceOverflowFlags, kernel_dump
from trainsentry.collectors.torch.distributed.rendezvous import GroupMaxReduce, meet
from trainsentry.collectors.torch.sharding.clean_names import CleanNames

PATIENCE_SECONDS: Final = 120.0
"""How long a rank waits for the others at the end of a step; one of them may be writing a dump."""

_replaced: dict[tuple[int, str], tuple[Any, Any]] = {}


class TorchDebugging:
    """Makes what the debugger's session needs from torch."""

    name: Final = "pytorch"
    rank_and_world_size = staticmethod(environment.rank_and_world_size)
    meet = staticmethod(meet)

    def max_reduce(self, rendezvous: Any) -> GroupMaxReduce:
        """Return the max-reduce over the ranks."""
        return GroupMaxReduce(rendezvous, PATIENCE_SECONDS)

    def scales_losses(self) -> bool:
        """Whether a loss scaler of torch is in use, which may skip a step that overflows; looks at every object."""
        return any(issubclass(type(x), torch.amp.GradScaler) and x.is_enabled() for x in gc.get_objects())

    def make_task(self, config: Any) -> Any:
        """Return the task that records calls.

        Raises:
            ValueError: for level L2 without an NPU, or with settings that it does not take, and for names of operations
                that torch does not have.

        """
        if config.level == "L2":
            switch = kernel_dump()
            if switch is None:
                raise ValueError(
                    "level: 'L2' dumps the kernels of an NPU, and this process has none: torch_npu is not imported, or "
                    "finds no device; allowed here: L0, L1, mix, debug"
                )
            names = CallNames(config.custom_op_namespaces or ())
            request, folder = kernel_request(config), Path(config.dump_path)
            return KernelCallDump(Guard(), request, switch, names, folder, lambda: self.rank_and_world_size()[0])
        if config.task == "free_benchmark":
            settings = config.free_benchmark.settings(self.rank_and_world_size()[0], config.dump_path)
            names = CallNames(config.custom_op_namespaces or ())
            return CallBenchmark(Guard(), settings, config.selection(risk_of), names)
        if config.task == "run_ut":
            chosen = config.run_ut
            chosen.check_names(names_an_operation, operation_names)
            lists = (frozenset(chosen.white_list), frozenset(chosen.black_list))
            return AccuracyTask(config.selection(risk_of), *lists, chosen.max_bytes)
        facts = TensorFacts(checksum=config.chosen.summary_mode == "md5")
        if config.task == "overflow_check":
            return OverflowTask(facts, flags=DeviceOverflowFlags())
        save, values = config.task == "tensor", config.task != "structure"
        return DumpTask(facts, config.selection(risk_of), save=save, values=values, later=config.async_dump)

    def make_watcher(self, guard: Guard, task: Any, config: Any) -> CallWatcher | CallBenchmark | KernelCallDump:
        """Return the watcher of calls; for free_benchmark and at level L2 it is the task itself."""
        if isinstance(task, (CallBenchmark, KernelCallDump)):
            task.guard = guard
            return task
        names = CallNames(config.custom_op_namespaces or ())
        stacks = config.extra_info and config.task != "run_ut"
        return CallWatcher(guard, task, config.selection(risk_of), names, stacks=stacks)

    def prepare(self, watcher: Any, named: Sequence[NamedModule], dump_path: str) -> None:
        """Do nothing: no preparation is needed before a model is compiled."""

    def release(self, watcher: Any) -> None:
        """Do nothing: there was no preparation."""

    def make_saved_variables(self, config: Any, guard: Guard) -> SavedVariables:
        """Return the object that `save` writes variables to."""
        facts = TensorFacts(checksum=config.chosen.summary_mode == "md5")
        return SavedVariables(facts, guard, task=config.task)

    def make_grad_probe(self, config: Any, model: Any, guard: Guard) -> ModelGradientProbe:
        """Return the probe that writes gradients before each update."""
        self.check_models([model])
        rank, _ = self.rank_and_world_size()
        settings = config.grad_probe
        folder = Path(config.dump_path) / f"rank{rank}"
        summary = GradientSummary(folder, settings.grad_level, tuple(settings.bounds))
        return ModelGradientProbe(model, summary, (tuple(config.step), tuple(settings.param_list)), guard)

    def nonfinite_weights(self, named: Sequence[NamedModule]) -> list[str]:
        """Return the names of the modules' own parameters that hold NaN or Inf; waits for a device."""
        return nonfinite((f"{n.name}.{leaf}", p) for n in named for leaf, p in n.module.named_parameters(recurse=False))

    def check_models(self, models: Sequence[Any]) -> None:
        """Check the given models.

        Raises:
            TypeError: for anything but modules.

        """
        for model in models:
            if not isinstance(model, nn.Module):
                raise TypeError(f"model: got {type(model).__name__}; allowed: torch.nn.Module, or a list of them")
        if not models:
            raise TypeError("model: got an empty list; allowed: torch.nn.Module, or a list of them")

    def named_modules(self, models: Sequence[nn.Module], root: str) -> list[NamedModule]:
        """Return modules with their names; with several models, each name starts with the model's number.

        `root` names the models themselves and prefixes the names inside; without it the models are left out.
        """
        found = []
        for number, model in enumerate(models):
            names = CleanNames(model)
            prefix = root or (str(number) if len(models) > 1 else "")
            for raw, module in model.named_modules():
                if names.is_inside(raw) or names.is_holder(raw):
                    continue
                name = names.of(raw)
                whole = ".".join(part for part in (prefix, name) if part)
                if name or root:
                    found.append(NamedModule(whole, module, number))
        return found

    def token_range(
        self, models: Sequence[nn.Module], token_range: Sequence[int], go: Callable[[], None], stop: Callable[[], None]
    ) -> "TokenRangeHooks":
        """Dump a range of calls of the first model, by calling `go` and `stop`."""
        return TokenRangeHooks(models[0], TokenRange(token_range[0], token_range[1], go, stop))

    def register_custom_api(self, watcher: CallWatcher, module: Any, api: str, prefix: str | None) -> None:
        """Record calls of `module.api` while the watcher runs.

        Raises:
            AttributeError: when there is no such function.

        """
        original = getattr(module, api, None)
        if not callable(original):
            raise AttributeError(  # noqa: TRY004 - it is not there
                f"register_custom_api: {module!r} has no function {api!r}"
            )
        key = (id(module), api)
        if key in _replaced:
            return
        package = prefix or str(getattr(module, "__name__", type(module).__name__)).partition(".")[0]

        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if not (watcher.running and watcher.selection.sees_operations):
                return original(*args, **kwargs)
            return watcher.call_custom(f"{package}.{api}", original, args, kwargs)

        setattr(module, api, watched)
        _replaced[key] = (module, original)

    def restore_custom_api(self, module: Any, api: str) -> None:
        """Undo `register_custom_api`; without effect when there was none."""
        known = _replaced.pop((id(module), api), None)
        if known is not None:
            setattr(module, api, known[1])


class TokenRangeHooks:
    """Hooks that report the calls of a model to a token range."""

    def __init__(self, model: nn.Module, tokens: TokenRange) -> None:
        self._handles = [
            model.register_forward_pre_hook(_Hook(tokens.begin_call)),
            model.register_forward_hook(_Hook(tokens.end_call), always_call=True),
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


class _Hook(InertWhenCopied):
    __slots__ = ("note",)

    def __init__(self, note: Callable[[], None]) -> None:
        self.note = note

    def __call__(self, *_: Any) -> None:
        self.note()
