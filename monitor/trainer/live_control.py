"""Carries out commands and changes of the configuration at step boundaries, alike on all ranks."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trainsentry.anomaly.incident import Incident, Suspect
from trainsentry.exporters.short_text import counted
from trainsentry.monitor.config.files import parse_config
from trainsentry.monitor.config.schema import MonitorConfig
from trainsentry.monitor.control.changes import adopted, described, with_settings
from trainsentry.monitor.control.config_file import ConfigFile
from trainsentry.monitor.control.control_file import ControlFile, parse_command
from trainsentry.monitor.errors import TrainingStopped
from trainsentry.monitor.recorder import messages

if TYPE_CHECKING:
    from trainsentry.monitor.trainer.step_loop import StepLoop

logger = logging.getLogger("trainsentry")

PART: Final = "control"

LOOK_SECONDS: Final = 1.0
"""Seconds between two looks at the files, on one rank: a look is two calls of the system."""

REQUESTED: Final = -1
"""The number of the incident that stands for a requested dump."""


@dataclass(frozen=True)
class Override:
    """Values that hold until a step (None: for good)."""

    values: dict[str, Any]
    until: int | None


class LiveControl:
    """One rank's part: the reading rank looks for commands, and every rank carries out what all have agreed on.

    `ranks` is the number of watched ranks, which share the false alarms. `commands` are those read so far. `base` holds
    for good, `composed` with the overrides that hold now; `config` is what is in use.
    """

    def __init__(self, loop: "StepLoop", config: MonitorConfig, ranks: int) -> None:
        self.loop = loop
        self.base = self.composed = config
        self.config = config
        self.ranks = ranks
        self.commands: list[dict[str, Any]] = []
        self._files: tuple[ControlFile, ConfigFile | None] | None = None
        self._overrides: list[Override] = []
        self._looked_at = time.monotonic()

    def read(self, path: Path, config_file: ConfigFile | None) -> None:
        """Make this rank the one that reads: the control file at `path`, and the configuration file if there is one."""
        self._files = (ControlFile(path), config_file)

    @property
    def reads(self) -> bool:
        """Whether this is the rank that reads."""
        return self._files is not None

    # ------------------------------------------------------------------ the reading rank

    def request(self, config: MonitorConfig) -> None:
        """Follow another configuration on all ranks; call this on every rank, and the reading rank's counts."""
        if self.reads:
            self.commands.append({"config": config.model_dump(mode="json")})

    def look(self, next_step: int) -> int:
        """Look for new commands, once a second; return how many were read so far."""
        now = time.monotonic()
        if self._files is not None and now - self._looked_at >= LOOK_SECONDS:
            self._looked_at = now
            self._attempt(self._look_at_commands)
            self._attempt(lambda: self._look_at_configuration(next_step))
        return len(self.commands)

    def _attempt(self, action: Callable[[], None]) -> None:
        """Do something; a mistake in a file or a command is logged, on every rank alike."""
        try:
            action()
        except (OSError, ValueError) as error:
            logger.error("trainsentry: left as it is: %s", error)  # noqa: TRY400 - the message says all

    def _look_at_commands(self) -> None:
        assert self._files is not None
        for line in self._files[0].new_lines():
            self._attempt(lambda line=line: self._take(line))  # type: ignore[misc]

    def _take(self, line: bytes) -> None:
        command = parse_command(line)
        if "set" in command:
            with_settings(self.config, command["set"])  # a mistake ends here
        self.commands.append(command)

    def _look_at_configuration(self, next_step: int) -> None:
        assert self._files is not None
        found = self._files[1].changed(next_step) if self._files[1] is not None else None
        if found is None:
            return
        _, refused = adopted(self.base, found)
        if refused:
            logger.warning("trainsentry: %s take effect at the next start", ", ".join(refused))
        self.commands.append({"config": found.model_dump(mode="json")})

    # ------------------------------------------------------------------ every rank

    def carry_out(self, commands: Sequence[dict[str, Any]], step: int) -> None:
        """Carry out commands before `step` opens, and end the overrides that end there."""
        ended = [o for o in self._overrides if o.until is not None and o.until <= step]
        if not commands and not ended:
            return
        self._overrides = [o for o in self._overrides if o not in ended]
        for command in commands:
            self._attempt(lambda command=command: self._carry_out(command, step))  # type: ignore[misc]
        self.composed = self.base
        for override in self._overrides:
            self._attempt(lambda values=override.values: self._compose(values))  # type: ignore[misc]
        self._use(self.composed, step)

    def _compose(self, values: dict[str, Any]) -> None:
        self.composed = with_settings(self.composed, values)

    def _carry_out(self, command: dict[str, Any], step: int) -> None:
        if "config" in command:
            self.base, _ = adopted(self.base, parse_config(command["config"], "configuration"))
        elif "set" in command:
            steps = command.get("for")
            if steps is None:
                self.base = with_settings(self.base, command["set"])
            else:
                self._overrides.append(Override(command["set"], step + int(steps)))
        elif "dump" in command:
            self._dump(step)
        elif "stop" in command:
            self.loop.triggers.stop = TrainingStopped(step - 1, str(command["stop"]))
            self._note(step, {"stop": str(command["stop"])})

    def _use(self, config: MonitorConfig, step: int) -> None:
        """Have every part use a configuration from `step` on, and note the change."""
        changes = described(self.config, config)
        if not changes:
            return
        old, self.config = self.config, config
        loop = self.loop
        loop.schedule.adopt(config)
        loop.overhead.adopt()
        loop.triggers.settings = config.on_incident
        if config.collect != old.collect:
            loop.guard.run(PART, loop.watch.adopt, config.collect_settings())
            if config.collect.communication is not None and not loop.consensus.is_single_rank:
                loop.guard.run(PART, loop.watch.watch_communication)
        detect = config.detect_settings(self.ranks)
        if config.export != old.export or detect != old.detect_settings(self.ranks):
            loop.link.reconfigure(config.model_dump(mode="json"), detect)
        self._note(step, changes)
        said = ", ".join(f"{key}={value!r}" for key, value in changes.items())
        logger.warning("trainsentry: from step %d on: %s", step, said)

    def _dump(self, step: int) -> None:
        """Dump every module in the step that opens next, within the budget of a dump."""
        dump = self.loop.triggers.dump
        if dump is None:
            logger.warning("trainsentry: nothing is dumped: on_incident.dump is off")
            return
        modules = [module["name"] for module in self.loop.watch.graph()["modules"]]
        suspects = tuple(Suspect(step, dump.rank, m, "", "", "", 0.0, m, "requested") for m in modules)
        said = f"a dump of {counted(len(modules), 'module')} was requested"
        dump.arm(
            Incident(REQUESTED, step, dump.rank, "", "", "", "", "warning", 0.0, said, suspects, (), step, step), step
        )
        self._note(step, {"dump": "now"})
        logger.warning("trainsentry: step %d is dumped", step)

    def _note(self, step: int, changes: dict[str, Any]) -> None:
        """Add a line to `sampling.jsonl`."""
        self.loop.link.send(messages.SAMPLING, line={**self.loop.overhead.sampling(step), "changed": changes})
