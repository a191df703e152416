"""The MindSpore side of the debugger: makes its tasks, watchers and probes, and meets the other ranks."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import mindspore as ms
from mindspore import nn

from trainsentry.collectors.calls.call import PART
from trainsentry.collectors.calls.call_selection import TokenRange
from trainsentry.collectors.calls.gradient_summary import GradientSummary
from trainsentry.collectors.guard import Guard
from trainsentry.collectors.mindspore import runtime
from trainsentry.collectors.mindspore.calls.call_dump import CallDump
from trainsentry.collectors.mindspore.calls.grad_probe import OptimizerGradientProbe
from trainsentry.collectors.mindspore.calls.graph_dump import GraphDump
from trainsentry.collectors.mindspore.calls.kernel_dump import KernelDump
from trainsentry.collectors.mindspore.calls.operations import forget_custom, register_custom
from trainsentry.collectors.mindspore.calls.saved_variables import SavedVariables
from trainsentry.collectors.mindspore.calls.tensor_facts import facts_of, is_finite
from trainsentry.collectors.mindspore.hooks.interception import unwatch_calls, watch_calls
from trainsentry.collectors.mindspore.rendezvous import meet
from trainsentry.collectors.mindspore.runtime import in_graph_mode, on_host
from trainsentry.collectors.mindspore.validation import checked_models
from trainsentry.collectors.ranks.rendezvous import EXCHANGE_SECONDS, SocketMaxReduce, SocketRendezvous
from trainsentry.collectors.shared.adapted_torch import adapted_torch
from trainsentry.collectors.shared.model_graph import NamedModule

if TYPE_CHECKING:
    from trainsentry.collectors.mindspore.calls.free_benchmark.call_benchmark import CallBenchmark

MindSporeTask: TypeAlias = "CallDump | KernelDump | CallBenchmark"

LEVELS: Final = ("L0", "L1", "mix", "debug", "L2")


class MindSporeDebugging:
    """Makes what the debugger's session needs from MindSpore."""

    rank_and_world_size = staticmethod(runtime.rank_and_world_size)
    meet = staticmethod(meet)

    def __init__(self) -> None:
        self.name: Final = "mindspore" if adapted_torch() is None else "mindtorch"
        self._dump: CallDump | None = None

    def max_reduce(self, rendezvous: SocketRendezvous | None) -> SocketMaxReduce:
        """Return the max-reduce over the ranks of a rendezvous.

        Raises:
            RuntimeError: when there are several ranks and no rendezvous.

        """
        if rendezvous is None and runtime.rank_and_world_size()[1] > 1:
            raise RuntimeError("the ranks have not met")
        return SocketMaxReduce(rendezvous, EXCHANGE_SECONDS)

    def scales_losses(self) -> bool:
        """Return False: a loss scaler of MindSpore is not looked for."""
        return False

    def make_task(self, config: Any) -> MindSporeTask:
        """Return the task that records calls.

        Raises:
            ValueError: for a level or a task that MindSpore does not support.

        """
        if config.level not in LEVELS:
            raise ValueError(f"level: {config.level!r} with MindSpore; allowed: {', '.join(LEVELS)}")
        if config.task == "free_benchmark":
            return self._make_benchmark(config)
        if config.task == "run_ut":
            raise ValueError(f"task: {config.task!r} with MindSpore; allowed: with PyTorch")
        if config.level == "L2":
            return KernelDump(config)
        kind = CallDump
        if in_graph_mode() and config.level == "L0":
            if on_host():
                raise ValueError(
                    "level: 'L0' in GRAPH_MODE on the CPU, which has no kernel of TensorDump; allowed: L2, or "
                    "PYNATIVE_MODE"
                )
            kind = GraphDump
        self._dump = kind(
            Guard(),
            PART,
            config.selection(lambda _: "CORE"),
            save=config.task in {"tensor", "overflow_check"},
            values=config.task != "structure",
            checksum=config.chosen.summary_mode == "md5",
            only_overflows=config.task == "overflow_check",
            stacks=config.extra_info,
            parameters=True,
        )
        return self._dump

    def _make_benchmark(self, config: Any) -> "CallBenchmark":
        block = config.free_benchmark
        if in_graph_mode():
            raise ValueError("task: 'free_benchmark' in GRAPH_MODE, which calls no operations; allowed: PYNATIVE_MODE")
        asked = {"fuzz_device": block.fuzz_device == "cpu", "if_preheat": block.if_preheat}
        for key in (key for key, value in asked.items() if value and not on_host()):
            raise ValueError(
                f"{key}: {getattr(block, key)!r} with MindSpore beside a device, where its process cannot use the CPU; "
                "allowed: fuzz_device npu, without if_preheat"
            )
        try:
            from trainsentry.collectors.mindspore.calls.free_benchmark.call_benchmark import CallBenchmark
        except ImportError as error:  # MindSpore before 2.10 does not tell which kernels run
            raise ValueError(
                f"task: 'free_benchmark' with MindSpore {ms.__version__}; allowed: 2.10 ({error})"
            ) from None
        settings = block.settings(self.rank_and_world_size()[0], config.dump_path)
        settings = replace(settings, mode_column="pert_type")
        return CallBenchmark(Guard(), settings, config.selection(lambda _: "CORE"))

    def make_watcher(self, guard: Guard, task: MindSporeTask, config: Any) -> MindSporeTask:
        """Return the watcher of calls: on MindSpore it is the task itself."""
        del config
        task.guard = guard
        return task

    def prepare(self, watcher: Any, named: Sequence[NamedModule], dump_path: str) -> None:
        """Make cells dump from the graph that they are compiled into."""
        if isinstance(watcher, GraphDump):
            watcher.prepare(named, dump_path)

    def release(self, watcher: Any) -> None:
        """Undo `prepare`."""
        if isinstance(watcher, GraphDump):
            watcher.release()

    def make_saved_variables(self, config: Any, guard: Guard) -> SavedVariables:
        """Return the object that `save` writes variables to."""
        return SavedVariables(guard, task=config.task)

    def make_grad_probe(self, config: Any, optimizer: Any, guard: Guard) -> OptimizerGradientProbe:
        """Return the probe that writes gradients before each update.

        Raises:
            TypeError: for anything but an optimizer, as only that receives the gradients.

        """
        if not isinstance(optimizer, nn.Optimizer):
            raise TypeError(f"monitor(optimizer): got {type(optimizer).__name__}; allowed: mindspore.nn.Optimizer")
        rank, _ = self.rank_and_world_size()
        settings = config.grad_probe
        folder = Path(config.dump_path) / f"rank{rank}"
        summary = GradientSummary(folder, settings.grad_level, tuple(settings.bounds))
        return OptimizerGradientProbe(optimizer, summary, (tuple(config.step), tuple(settings.param_list)), guard)

    def nonfinite_weights(self, named: Sequence[NamedModule]) -> list[str]:
        """Return the names of the cells' own parameters that hold NaN or Inf; waits for a device."""
        own = [(f"{n.name}.{leaf}", p) for n in named for leaf, p in n.module._params.items() if p is not None]
        return [name for name, parameter in own if not is_finite(facts_of(parameter))]

    def check_models(self, models: Sequence[Any]) -> None:
        """Check the given models.

        Raises:
            TypeError: for anything but cells.

        """
        for model in models:
            if not isinstance(model, nn.Cell):
                raise TypeError(f"model: got {type(model).__name__}; allowed: mindspore.nn.Cell, or a list of them")
        checked_models(list(models))

    def named_modules(self, models: Sequence[nn.Cell], root: str) -> list[NamedModule]:
        """Return cells with their names; with several models, each name starts with the model's number.

        `root` names the models themselves and prefixes the names inside; without it the models are left out.
        """
        found = []
        for number, model in enumerate(models):
            prefix = root or (str(number) if len(models) > 1 else "")
            for name, cell in model.cells_and_names():
                whole = ".".join(part for part in (prefix, name) if part)
                if name or root:
                    found.append(NamedModule(whole, cell, number))
        return found

    def token_range(
        self, models: Sequence[nn.Cell], token_range: Sequence[int], go: Callable[[], None], stop: Callable[[], None]
    ) -> "TokenRangeListener":
        """Dump a range of calls of the first model, by calling `go` and `stop`."""
        return TokenRangeListener(models[0], TokenRange(token_range[0], token_range[1], go, stop))

    def register_custom_api(self, watcher: CallDump, module: Any, api: str, prefix: str | None) -> None:
        """Record a function of a module or class as an operation too, from the next start on.

        Raises:
            AttributeError: when there is no such function.

        """
        del watcher
        register_custom(module, api, prefix)

    def restore_custom_api(self, module: Any, api: str) -> None:
        """Undo `register_custom_api`; without effect when there was none."""
        forget_custom(module, api)


class TokenRangeListener:
    """Reports the calls of a model to a token range."""

    def __init__(self, model: nn.Cell, tokens: TokenRange) -> None:
        self._model = model
        self._tokens = tokens
        watch_calls(model, self)

    def close(self) -> None:
        """Stop reporting calls."""
        unwatch_calls(self._model, self)

    def enter(self, cell: nn.Cell, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Report that a call begins."""
        del cell, args, kwargs
        self._tokens.begin_call()

    def leave(self, cell: nn.Cell, output: Any) -> None:
        """Report that a call has ended."""
        del cell, output
        self._tokens.end_call()
