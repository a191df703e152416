"""What a debugger needs of MindSpore."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from mindspore import nn

from trainsentry.collectors.calls.gradient_summary import GradientSummary
from trainsentry.collectors.guard import Guard
from trainsentry.collectors.mindspore import rendezvous, runtime
from trainsentry.collectors.mindspore.calls.call_dump import CallDump
from trainsentry.collectors.mindspore.calls.grad_probe import GradientProbe
from trainsentry.collectors.mindspore.calls.graph_dump import GraphDump
from trainsentry.collectors.mindspore.calls.kernel_dump import KernelDump
from trainsentry.collectors.mindspore.calls.operations import forget_custom, register_custom
from trainsentry.collectors.mindspore.calls.saved_variables import SavedVariables
from trainsentry.collectors.mindspore.hooks.interception import unwatch_calls, watch_calls
from trainsentry.collectors.mindspore.runtime import in_graph_mode, on_host
from trainsentry.collectors.mindspore.validation import checked_models
from trainsentry.collectors.ranks.rendezvous import EXCHANGE_SECONDS, SocketMaxReduce, SocketRendezvous
from trainsentry.collectors.shared.adapted_torch import adapted_torch
from trainsentry.collectors.shared.model_graph import NamedModule

PART: Final = "debugger"
LEVELS: Final = ("L0", "L1", "mix", "debug", "L2")


class MindSporeDebugging:
    """Tasks, watchers and ranks, as the debugger's session asks for them."""

    rank_and_world_size = staticmethod(runtime.rank_and_world_size)
    meet = staticmethod(rendezvous.meet)

    def __init__(self) -> None:
        self.name: Final = "mindspore" if adapted_torch() is None else "mindtorch"
        self._dump: CallDump | None = None

    def max_reduce(self, met: SocketRendezvous | None) -> SocketMaxReduce:
        """Return what finds the greatest of numbers of the ranks that have met.

        Raises:
            RuntimeError: with several ranks that have not.

        """
        if met is None and runtime.rank_and_world_size()[1] > 1:
            raise RuntimeError("the ranks have not met")
        return SocketMaxReduce(met, EXCHANGE_SECONDS)

    def make_task(self, config: Any) -> CallDump | KernelDump:
        """Return what is done with each call.

        Raises:
            ValueError: for a level or a task that there is not for MindSpore.

        """
        if config.level not in LEVELS:
            raise ValueError(f"level: {config.level!r} with MindSpore; allowed: {', '.join(LEVELS)}")
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
        )
        return self._dump

    def make_watcher(self, guard: Guard, task: CallDump | KernelDump, config: Any) -> CallDump | KernelDump:
        """Return what sees the calls: on MindSpore the same."""
        del config
        task.guard = guard
        return task

    def prepare(self, watcher: Any, named: Sequence[NamedModule], dump_path: str) -> None:
        """Have cells dumped by the graph that they are compiled into."""
        if isinstance(watcher, GraphDump):
            watcher.prepare(named, dump_path)

    def release(self, watcher: Any) -> None:
        """Give cells back as they were."""
        if isinstance(watcher, GraphDump):
            watcher.release()

    def make_saved_variables(self, config: Any, guard: Guard) -> SavedVariables:
        """Return what `save` writes to."""
        return SavedVariables(guard, task=config.task)

    def make_grad_probe(self, config: Any, optimizer: Any, guard: Guard) -> GradientProbe:
        """Return what writes gradients before each update.

        Raises:
            TypeError: for anything but an optimizer, which alone is given the gradients.

        """
        if not isinstance(optimizer, nn.Optimizer):
            raise TypeError(f"monitor(optimizer): got {type(optimizer).__name__}; allowed: mindspore.nn.Optimizer")
        rank, _ = self.rank_and_world_size()
        settings = config.grad_probe
        folder = Path(config.dump_path) / f"rank{rank}"
        summary = GradientSummary(folder, settings.grad_level, tuple(settings.bounds))
        return GradientProbe(optimizer, summary, (tuple(config.step), tuple(settings.param_list)), guard)

    def check_models(self, models: Sequence[Any]) -> None:
        """Check what is given as models.

        Raises:
            TypeError: for anything but cells.

        """
        for model in models:
            if not isinstance(model, nn.Cell):
                raise TypeError(f"model: got {type(model).__name__}; allowed: mindspore.nn.Cell, or a list of them")
        checked_models(list(models))

    def named_modules(self, models: Sequence[nn.Cell], root: str) -> list[NamedModule]:
        """Return cells with their names; those of several models carry the model's number, the roots are left out."""
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
    ) -> "TokenRange":
        """Have some calls of the first model dumped."""
        return TokenRange(models[0], token_range[0], token_range[1], go, stop)

    def register_custom_api(self, watcher: CallDump, module: Any, api: str, prefix: str | None) -> None:
        """Have a function of a module or class recorded as an operation too.

        Raises:
            AttributeError: when there is none of that name.

        """
        del watcher  # the next start sees it
        register_custom(module, api, prefix)

    def restore_custom_api(self, module: Any, api: str) -> None:
        """Record it no more."""
        forget_custom(module, api)


class TokenRange:
    """Counts the calls of a model from 0, and has those from `first` to `last` dumped."""

    def __init__(self, model: nn.Cell, first: int, last: int, go: Callable[[], None], stop: Callable[[], None]) -> None:
        self._model = model
        self._first, self._last = first, last
        self._go, self._stop = go, stop
        self._calls = 0
        watch_calls(model, self)

    def close(self) -> None:
        """Count no more."""
        unwatch_calls(self._model, self)

    def enter(self, cell: nn.Cell, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call of the model begins."""
        del cell, args, kwargs
        if self._first <= self._calls <= self._last:
            self._go()

    def leave(self, cell: nn.Cell, output: Any) -> None:
        """It has ended."""
        del cell, output
        self._calls += 1
        self._stop()
