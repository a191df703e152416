"""Watches the models of an unchanged script: they are found when an optimizer first steps."""

import logging
import os
import sys
from collections.abc import Callable
from typing import Any, Final

from trainsentry.exporters.short_text import counted
from trainsentry.monitor.config.schema import MonitorConfig
from trainsentry.monitor.errors import ConfigError
from trainsentry.monitor.script.imports import when_imported
from trainsentry.monitor.train_monitor import TrainMonitor
from trainsentry.monitor.trainer.ending import open_monitors

logger = logging.getLogger("trainsentry")

FRAMEWORK: Final = "torch"
"""The package whose optimizers are waited for."""


class UnchangedScript:
    """Watches what a script trains, from the second step of its first optimizer on; with `dry`, only says what.

    A script that watches its models itself is left alone. A mistake here never reaches the script.
    """

    def __init__(self, config: MonitorConfig, *, dry: bool = False) -> None:
        self.config = config
        self.dry = dry
        self.monitor: TrainMonitor | None = None
        self._known: list[Any] = []
        self._seen: set[int] = set()
        self._kept: list[Any] = []
        self._end: Callable[[], None] = lambda: None

    def begin(self) -> None:
        """Wait for the script to import torch and to step an optimizer."""
        when_imported(FRAMEWORK, self._listen)

    def _listen(self) -> None:
        try:
            from trainsentry.collectors.torch.discovery import before_each_step

            self._end = before_each_step(self._step_begins)
        except Exception:
            logger.exception("trainsentry: run: this script is not watched")

    def _step_begins(self, optimizer: Any) -> None:
        """Watch an optimizer's model before its first step."""
        if id(optimizer) in self._seen:
            return
        self._seen.add(id(optimizer))
        self._kept.append(optimizer)  # its id must stay its own
        if self.monitor is None and open_monitors():
            logger.info("trainsentry: the script watches its models itself")
            self._end()
            return
        try:
            self._watch(optimizer)
        except ConfigError:
            raise
        except Exception as error:
            logger.exception("trainsentry: run: %s is not watched. Training goes on.", type(optimizer).__name__)
            if self.config.strict:
                raise error from None

    def _watch(self, optimizer: Any) -> None:
        from trainsentry.collectors.torch.discovery import discover

        found = discover(optimizer, self._known)
        self._seen.update(id(each) for each in found.optimizers)
        self._kept += found.optimizers
        if not found.models:
            return
        if self.dry:
            self._say(found.models, found.optimizers)
            raise SystemExit(0)
        if self.monitor is None:
            first = max(self.config.start_step, 1)  # the passes of step 0 are over
            self.monitor = TrainMonitor(self.config.model_copy(update={"start_step": first}))
        model, optimizers = found.watched
        self.monitor.watch(model, optimizers)
        self._known += [each.module for each in found.models]

    def _say(self, models: Any, optimizers: Any) -> None:
        """Print what would be watched, on the first rank."""
        if os.environ.get("RANK", "0") != "0":
            return
        lines = ["trainsentry would watch, from the second step on:"]
        for model in models:
            kind = type(model.module).__name__
            lines.append(f"  model {model.name}: {kind}, {counted(model.parameters, 'parameter')} in optimizers")
        for each in optimizers:
            size = sum(p.numel() for group in each.param_groups for p in group["params"])
            lines.append(f"  optimizer {type(each).__name__}: {counted(size, 'parameter')}")
        if not optimizers:
            lines.append("  optimizer: the engine's own")
        lines.append(f"  to {self.config.output_dir}")
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()
