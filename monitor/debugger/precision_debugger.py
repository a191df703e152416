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
    """Dumps inputs and outputs of modules and operations, forward and backward, of selected steps and ranks.

    A process has one debugger: until `close()`, later constructors return it and ignore their arguments. `framework`
    defaults to that of `model`, else to the one that is imported. Methods can also be called on the class. Keys of the
    file and layout of the dumps are msprobe's; see docs/debugger.md.

    Raises:
        ConfigError: for an invalid key or value, a level that does not fit the task, or a `dump_path` that is not
            writable.

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
                logger.info("trainsentry: a PrecisionDebugger already exists; these arguments are ignored")
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
        """Start dumping, if the step and the rank are selected; `model` is a module or a list of modules.

        `token_range=[first, last]` dumps only these calls of the model, counted from 0 (for inference).

        Raises:
            ValueError: when modules are to be dumped and no model is given, or for an invalid range.

        """
        session = cls._of("start")
        session.start(model if model is not None else getattr(cls._instance, "model", None), token_range)

    @classmethod
    def stop(cls) -> None:
        """Stop dumping calls until the next `start`; their backward passes are dumped until `step`."""
        cls._of("stop").stop()

    @classmethod
    def step(cls) -> None:
        """End the step.

        Raises:
            OverflowLimitReached: on every rank, when overflow_check counts `overflow_nums` overflowing calls.

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
            ValueError: for a name that is empty or not a text.

        """
        if not isinstance(name, str) or not name:
            raise ValueError(f"save(name): got {name!r}; allowed: a non-empty text")
        writer = cls._of("save").writer_for_debug()
        if writer is not None:
            writer.save(variable, name, save_backward)

    @classmethod
    def set_init_step(cls, step: int) -> None:
        """Count steps from `step` on, for a run that resumes from a checkpoint.

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
        """Also dump the calls of the user's function `module.api`, named by `api_prefix` or after its package.

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
        """Dump only the calls of one module and its submodules, as `Module.<dump_name>…`, until `module_dump_end`.

        Modules are dumped at every level, the operations inside them at level mix. Without `start`, nothing else is.

        Raises:
            ValueError: for a name that is empty or not a text.
            TypeError: for anything but a module.

        """
        if not isinstance(dump_name, str) or not dump_name:
            raise ValueError(f"module_dump(dump_name): got {dump_name!r}; allowed: a non-empty text")
        session = cls._of("module_dump")
        session.framework.check_models([module])
        session.module_dump(module, dump_name)

    @classmethod
    def module_dump_end(cls) -> None:
        """End `module_dump`: what `start` began goes on."""
        cls._of("module_dump_end").module_dump_end()

    @classmethod
    def monitor(cls, model: Any) -> None:
        """Write the gradients of a model (on MindSpore: an optimizer) before each update; needs the task grad_probe.

        Raises:
            ValueError: with another task.
            TypeError: for an object without gradients.

        """
        session = cls._of("monitor")
        if session.config.task != "grad_probe":
            raise ValueError(f"monitor() with task {session.config.task!r}; allowed: task grad_probe")
        session.probe = session.framework.make_grad_probe(session.config, model, session.guard)
        session.probe.step = session.iteration

    @classmethod
    def close(cls) -> None:
        """End the debugger: remove hooks, close files, and allow another debugger."""
        session, cls._session, cls._instance = cls._session, None, None
        if session is not None:
            session.close()

    @classmethod
    def _of(cls, method: str) -> DumpSession:
        if cls._session is None:
            raise RuntimeError(f"PrecisionDebugger.{method}(): no debugger; allowed: after PrecisionDebugger(...)")
        return cls._session


def _session_for(config: DebuggerConfig, framework: str) -> DumpSession:
    if framework == "mindspore":
        from trainsentry.collectors.mindspore.calls.debugging import MindSporeDebugging as Debugging
    else:
        from trainsentry.collectors.torch.calls.debugging import TorchDebugging as Debugging  # type: ignore[assignment]
    if config.seed is not None or config.is_deterministic:
        seed_all(1234 if config.seed is None else config.seed, config.is_deterministic, rm_dropout=False)
    try:
        return DumpSession(config, Debugging())
    except ValueError as error:  # a setting that this framework lacks
        raise ConfigError(str(error)) from None


def _framework(given: str | None, model: Any) -> str:
    """Return the framework: the given one, the model's, or the only one that is imported.

    Raises:
        ConfigError: for an unknown framework, or when the framework is ambiguous.

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
