"""Runs one debugger: decides which steps and ranks to dump, and where."""

import logging
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from trainsentry.collectors.guard import Guard
from trainsentry.exporters.dumps.step_dump import TENSORS, StepDump, VariableFile
from trainsentry.exporters.short_text import first_of
from trainsentry.monitor.debugger.debugger_config import DebuggerConfig
from trainsentry.monitor.debugger.overflow_count import OverflowCount
from trainsentry.monitor.debugger.step_check import StepCheck

logger = logging.getLogger("trainsentry")

PART: Final = "debugger"
CHECKS: Final = "run_ut"
"""The guard's name of the check of a step: when it fails, what it checks is no longer recorded."""

DUMPING: Final = frozenset({"statistics", "tensor", "structure", "overflow_check", "run_ut"})
"""Tasks that write dumps of calls."""

ERRORS: Final = "dump_error_info.log"
"""The file in a step's folder that has what could not be dumped, as in msprobe 26.2."""


class LoggingGuard(Guard):
    """A guard that also passes the failures of its parts to `note(part, error)`."""

    def __init__(self, note: Callable[[str, BaseException], None]) -> None:
        super().__init__()
        self._note = note

    def report(self, part: str, error: BaseException) -> None:
        """Report a failure as every guard, and note it."""
        super().report(part, error)
        self._note(part, error)

    def refuse(self, part: str, error: Exception) -> None:
        """Report an object that cannot be read as every guard, and note it."""
        super().refuse(part, error)
        self._note(part, error)


class DumpSession:
    """Dumps the selected steps. `framework` holds the framework's part of the debugger; see `TorchDebugging`."""

    def __init__(self, config: DebuggerConfig, framework: Any) -> None:
        self.config = config
        self.framework = framework
        self.guard = LoggingGuard(self._note_failure)
        self.iteration = 0
        self.task = framework.make_task(config)
        self.watcher = framework.make_watcher(self.guard, self.task, config)
        self.overflows = OverflowCount(config.overflow_check.overflow_nums) if config.task == "overflow_check" else None
        if self.overflows is not None:
            self.watcher.after_call = self._stop_at_limit
        self.checks: StepCheck | None = None
        self.probe: Any = None
        self.saved: Any = None
        self._dump: StepDump | None = None
        self._models: list[Any] = []
        self._named: list[Any] = []
        self._range: Any = None
        self._started = False
        self._in_window = False
        self._stopped = False
        self._checked_rank = False
        self._checked_step: int | None = None

    @property
    def is_over(self) -> bool:
        """Whether all selected steps have passed."""
        return bool(self.config.step) and self.iteration > max(self.config.step)

    def start(self, model: Any, token_range: Sequence[int] | None) -> None:
        """Start dumping, if the step and the rank are selected."""
        self._take_model(model)
        if token_range is not None:
            self._check_range(token_range)
        in_rank = self._is_rank_selected()
        if in_rank:
            self.guard.run(PART, self.framework.prepare, self.watcher, self._named, self.config.dump_path)
        if not in_rank or not self._is_selected() or self._started or CHECKS in self.guard.disabled:
            return
        self._started = True
        if self.config.level == "debug" or self.config.task == "grad_probe":
            return  # these write no calls
        if self.config.task == "free_benchmark" or self.config.level == "L2":
            self.watcher.iteration = self.iteration  # their files are no dump of ours
        else:
            self._open()
        if self.config.task == "overflow_check":
            self.guard.run(PART, self._tell_of_weights)
        if token_range is None:
            self.watcher.start(self._named)
        else:
            self._range = self.framework.token_range(self._models, token_range, self._start_watcher, self.watcher.stop)

    def stop(self) -> None:
        """Stop dumping until the next `start`; the backward passes of the dumped calls follow until `step`."""
        if not (self._started or self._in_window):
            return
        self._started = self._in_window = False
        if self._range is not None:
            self._range.close()
            self._range = None
        self.watcher.stop()
        if self.overflows is not None:
            self._stop_at_limit()

    def step(self) -> None:
        """End the step; calls of the next step are numbered from 0.

        Raises:
            OverflowLimitReached: on every rank, when one rank has `overflow_nums` overflowing calls.

        """
        was_over, self._stopped = self.is_over, True  # from here on the end of the step stops
        self.stop()
        self.watcher.reset()
        self._close()
        if self.checks is not None:
            self.guard.run(CHECKS, self._check_step, self.checks)
        if self.saved is not None:
            self.saved.end_step()
        step, self.iteration = self.iteration, self.iteration + 1
        if self.is_over and not was_over:
            logger.info("trainsentry: the debugger has dumped all selected steps (%s)", self.config.step)
        if self.overflows is not None:
            self._stopped = False
            self.overflows.end_step(step, self.task.take_counts(), self.framework)

    def module_dump(self, module: Any, name: str) -> None:
        """Dump only the calls of one module and its submodules, under the given name, until `module_dump_end`."""
        if not self._is_selected() or self.config.level in {"debug", "L2"} or self.config.task not in DUMPING:
            return
        self._open()
        self._in_window = True
        self.watcher.stop()
        self.watcher.start(self.framework.named_modules([module], name), window=True)

    def module_dump_end(self) -> None:
        """End `module_dump`: what `start` began goes on."""
        if not self._in_window:
            return
        self._in_window = False
        self.watcher.stop()
        if self._started and self._range is None:
            self._start_watcher()

    def writer_for_debug(self) -> Any:
        """Return the writer of `save`; None when the step or the rank is not selected."""
        if self.config.level != "debug" or not self._is_selected():
            return None
        if self.saved is None:
            self.saved = self.framework.make_saved_variables(self.config, self.guard)
        if self.saved.writer is None:
            self.guard.run(PART, lambda: self.saved.begin(VariableFile(self._folder(), self._head())))
        return self.saved

    def close(self) -> None:
        """Remove every hook and close every file."""
        self._stopped = True  # the end of a run is no place to stop it
        self.stop()
        self.watcher.reset()
        self.guard.run(PART, self.framework.release, self.watcher)
        self._close()
        for part in (self.saved, self.probe, self.overflows, self.checks):
            if part is not None:
                part.close()
        never = [s for s in self.config.step if s >= self.iteration]
        if never and self.iteration:
            logger.warning("trainsentry: step: %s never came; the last step was %d", never, self.iteration - 1)

    def _check_step(self, checks: StepCheck) -> None:
        """Check the step's calls, if it was recorded."""
        if self.task.calls:
            checks.check(self.iteration, self._folder(), self.task)
        self.task.begin_step()

    def _stop_at_limit(self) -> None:
        """Stop at the call that reaches `overflow_nums`, where no rank is left waiting and no step may be skipped.

        Raises:
            OverflowLimitReached: when the limit is reached, once in a step; `step` raises it in any case.

        """
        limit = self.overflows
        if limit is None or self._stopped or not 0 < limit.limit <= limit.calls + self.task.calls:
            return
        self._stopped = True
        if self.framework.rank_and_world_size()[1] == 1 and not self.framework.scales_losses():
            raise limit.reached(self.iteration, limit.calls + self.task.calls, limit.first or self.task.first)

    def _note_failure(self, part: str, error: BaseException) -> None:
        """Add a failure to the step's `dump_error_info.log`."""
        text = "".join(traceback.format_exception(error))
        with suppress(OSError):
            folder = self._folder()
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / ERRORS).open("a", encoding="utf-8") as file:
                file.write(f"{datetime.now().astimezone().isoformat(timespec='seconds')} {part}: {text}\n")

    def _tell_of_weights(self) -> None:
        """Say first if weights are not finite already, as calls pass that on; calls of the step before have told."""
        before, self._checked_step = self._checked_step, self.iteration
        broken = [] if before in {self.iteration - 1, self.iteration} else self.framework.nonfinite_weights(self._named)
        if broken:
            logger.warning(
                "trainsentry: overflow_check: step %d begins with NaN or Inf in %s; calls that overflow pass it on",
                self.iteration,
                first_of(broken),
            )

    def _start_watcher(self) -> None:
        self.watcher.start(self._named)

    def _take_model(self, model: Any) -> None:
        if model is not None:
            models = list(model) if isinstance(model, (list, tuple)) else [model]
            self.framework.check_models(models)
            if len(models) != len(self._models) or any(a is not b for a, b in zip(models, self._models, strict=True)):
                self._models = models
                self._named = self.framework.named_modules(models, "")
        if not self._models and self.config.level in {"L0", "mix"} and self.config.task != "grad_probe":
            raise ValueError(
                f"start(model): None at level {self.config.level!r}; allowed: the model, or a list of them"
            )

    def _check_range(self, token_range: Sequence[int]) -> None:
        whole = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in token_range)
        if len(token_range) != 2 or not whole or token_range[0] > token_range[1]:
            raise ValueError(f"start(token_range): {list(token_range)!r}; allowed: [first, last], from 0 on")
        if not self._models:
            raise ValueError("start(token_range): no model; allowed: with the model whose calls are counted")

    def _is_selected(self) -> bool:
        return self._is_rank_selected() and (not self.config.step or self.iteration in self.config.step)

    def _is_rank_selected(self) -> bool:
        rank, size = self.framework.rank_and_world_size()
        if not self._checked_rank:
            self._checked_rank = True
            beyond = [r for r in self.config.rank if r >= size]
            if beyond:
                logger.warning(
                    "trainsentry: rank: %s do not exist and have no dump; there are 0 to %d", beyond, size - 1
                )
        return not self.config.rank or rank in self.config.rank

    def _folder(self) -> Path:
        rank, _ = self.framework.rank_and_world_size()
        tree = getattr(self.task, "tree", "")
        return Path(self.config.dump_path) / tree / f"step{self.iteration}" / f"rank{rank}"

    def _open(self) -> None:
        if self._dump is not None or PART in self.guard.disabled:
            return
        if self.config.task == "run_ut" and self.checks is None:
            self.checks = StepCheck(self.config.run_ut, self.config.dump_path, self.framework.rank_and_world_size()[0])
        folder = self._folder() if self.checks is None else self.checks.scratch
        extra = self.config.extra_info and self.checks is None
        self._dump = self.guard.run(PART, lambda: StepDump(folder, self._head(), extra_info=extra))
        self.task.writer = self._dump

    def _head(self) -> dict[str, Any]:
        """Return the first members of dump.json."""
        saves = self.config.task in {"tensor", "overflow_check", "run_ut"}
        return {
            "task": self.config.task,
            "level": self.config.level,
            "framework": self.framework.name,
            "dump_data_dir": str(self._folder() / TENSORS) if saves else None,
        }

    def _close(self) -> None:
        dump, self._dump, self.task.writer = self._dump, None, None
        if dump is not None:
            self.guard.run(PART, dump.close)
