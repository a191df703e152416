"""`PrecisionDebugger`: msprobe's debugger, with its calls and its configuration."""

import logging
import sys
from collections.abc import Sequence
from typing import Any, ClassVar, Final

from typing_extensions import Self

from trainsentry.collectors.shared.adapted_torch import adapted_torch
from trainsentry.monitor.debugger.debugger_config import DebuggerConfig, load_debugger_config
from trainsentry.monitor.debugger.dump_session import DumpSession
from trainsentry.monitor.errors import ConfigError
from trainsentry.monitor.seeding import seed_all

FRAMEWORKS: Final = {"torch": "torch", "pytorch": "torch", "mindspore": "mindspore"}

logger = logging.getLogger("trainsentry")


class PrecisionDebugger:
    """Dumps what modules and operations take and give, forward and backward, of chosen steps and ranks.

    There is one debugger in a process: later constructors return it and ignore their arguments, until `close()`.
    `framework` is that of `model`, or the one that is imported, unless it is given. Methods can be called on the class
    as well. Keys of the file and dumps are msprobe's; see docs/debugger.md.

    Raises:
        ConfigError: for a key or value that is not allowed, a task and a level that do not go together, or a
            `dump_path` that cannot be written to.

    """

    _instance: ClassVar["PrecisionDebugger | None"] = None
    _session: ClassVar[DumpSession | None] = None

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Return the debugger of this process."""
        known: Any = cls._instance
        return known if known is not None else super().__new__(cls)

    def __init__(
        self,
        config_path: str | None = None,
        task: str | None = None,
        dump_path: str | None = None,
        level: str | None = None,
        model: Any = None,
        step: "list[int | str] | None" = None,
        framework: str | None = None,
    ) -> None:
        kind = type(self)
        if kind._instance is not None:
            if config_path is not None or task is not None or dump_path is not None:
                logger.info("trainsentry: there is a PrecisionDebugger already; these arguments are not read")
            return
        given = {"task": task, "dump_path": dump_path, "level": level, "step": step}
        config, warnings = load_debugger_config(None if config_path is None else str(config_path), given)
        for warning in warnings:
            logger.warning("trainsentry: %s", warning)
        self.model = model
        kind._session = _session_for(config, _framework(framework, model))
        kind._instance = self

    @classmethod
    def start(cls, model: Any = None, token_range: Sequence[int] | None = None) -> None:
        """Begin to dump, if the step and the rank are asked for; `model` is a module or a list of them.

        With `token_range=[first, last]` only those calls of the model are dumped, counted from 0 (inference).

        Raises:
            ValueError: without a model where modules are dumped, or for a range that is none.

        """
        session = cls._of("start")
        session.start(model if model is not None else getattr(cls._instance, "model", None), token_range)

    @classmethod
    def stop(cls) -> None:
        """Dump no more until the next `start`."""
        cls._of("stop").stop()

    @classmethod
    def step(cls) -> None:
        """End the step.

        Raises:
            OverflowLimitReached: with overflow_check, at the `overflow_nums`-th overflowing call, on every rank.

        """
        cls._of("step").step()

    @classmethod
    def forward_backward_dump_end(cls) -> None:
        """Do what `stop` does, as in older scripts."""
        cls.stop()

    @classmethod
    def save(cls, variable: Any, name: str, save_backward: bool = True) -> None:
        """Dump a variable at level debug: tensors, numbers and texts, and lists, tuples and mappings of them.

        Raises:
            ValueError: for a name that is empty or no text.

        """
        if not isinstance(name, str) or not name:
            raise ValueError(f"save(name): got {name!r}; allowed: a text that is not empty")
        writer = cls._of("save").writer_for_debug()
        if writer is not None:
            writer.save(variable, name, save_backward)

    @classmethod
    def set_init_step(cls, step: int) -> None:
        """Count steps from `step` on: the run goes on from a checkpoint.

        Raises:
            ValueError: for anything but a whole number from 0 on.

        """
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"set_init_step(step): got {step!r}; allowed: a whole number from 0 on")
        session = cls._of("set_init_step")
        session.iteration = step
        if session.probe is not None:
            session.probe.step = step

    @classmethod
    def register_custom_api(cls, module: Any, api: str, api_prefix: str | None = None) -> None:
        """Dump calls of a function of the user's, `module.api`, too; named after the package unless told.

        Raises:
            AttributeError: when the module has no such function.

        """
        session = cls._of("register_custom_api")
        session.framework.register_custom_api(session.watcher, module, api, api_prefix)

    @classmethod
    def restore_custom_api(cls, module: Any, api: str) -> None:
        """Undo `register_custom_api`."""
        cls._of("restore_custom_api").framework.restore_custom_api(module, api)

    @classmethod
    def module_dump(cls, module: Any, dump_name: str) -> None:
        """Dump the calls of one module, and of all in it, as `Module.<dump_name>…`, until `module_dump_end`.

        Raises:
            ValueError: for a name that is empty or no text.
            TypeError: for anything but a module.

        """
        if not isinstance(dump_name, str) or not dump_name:
            raise ValueError(f"module_dump(dump_name): got {dump_name!r}; allowed: a text that is not empty")
        session = cls._of("module_dump")
        session.framework.check_models([module])
        session.module_dump(module, dump_name)

    @classmethod
    def module_dump_end(cls) -> None:
        """End what `module_dump` began."""
        cls._of("module_dump_end").stop()

    @classmethod
    def monitor(cls, model: Any) -> None:
        """With the task grad_probe: write the gradients of a model before each update; on MindSpore, of an optimizer.

        Raises:
            ValueError: with another task.
            TypeError: for what has no gradients.

        """
        session = cls._of("monitor")
        if session.config.task != "grad_probe":
            raise ValueError(f"monitor() with task {session.config.task!r}; allowed: task grad_probe")
        session.probe = session.framework.make_grad_probe(session.config, model, session.guard)
        session.probe.step = session.iteration

    @classmethod
    def close(cls) -> None:
        """End the debugger: hooks are removed, files closed, and another one can be made."""
        session, cls._session, cls._instance = cls._session, None, None
        if session is not None:
            session.close()

    @classmethod
    def _of(cls, what: str) -> DumpSession:
        if cls._session is None:
            raise RuntimeError(f"PrecisionDebugger.{what}(): no debugger; allowed: after PrecisionDebugger(...)")
        return cls._session


def _session_for(config: DebuggerConfig, framework: str) -> DumpSession:
    if framework == "mindspore":
        from trainsentry.collectors.mindspore.calls.debugging import MindSporeDebugging as Debugging
    else:
        from trainsentry.collectors.torch.calls.debugging import TorchDebugging as Debugging  # type: ignore[assignment]
    if config.seed is not None or config.is_deterministic:
        seed_all(1234 if config.seed is None else config.seed, config.is_deterministic)
    try:
        return DumpSession(config, Debugging())
    except ValueError as error:  # what this framework does not have
        raise ConfigError(str(error)) from None


def _framework(given: str | None, model: Any) -> str:
    """Return the framework that is meant: the one given, the model's, or the only one that is imported.

    Raises:
        ConfigError: for one that is none, or when it cannot be told.

    """
    if given is not None:
        if given not in FRAMEWORKS:
            raise ConfigError(f"framework: {given!r}; allowed: {', '.join(FRAMEWORKS)}, or None for the model's")
        return FRAMEWORKS[given]
    first = model[0] if isinstance(model, (list, tuple)) and model else model
    bases = {base.__module__.partition(".")[0] for base in type(first).__mro__}
    kinds = ("mindspore",) if adapted_torch() is not None else ("torch", "mindspore")
    for name in kinds:
        if name in bases:
            return name
    imported = [name for name in kinds if name in sys.modules]
    if len(imported) > 1:
        raise ConfigError("framework: None, and both torch and mindspore are imported; allowed: one of them")
    return imported[0] if imported else "torch"
