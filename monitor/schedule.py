"""Decides which parts of which steps are sampled."""

from trainsentry.collectors.settings import COMMUNICATION, PARTS, Plan
from trainsentry.monitor.config.schema import MonitorConfig

NOTHING: Plan = frozenset()


class Schedule:
    """Selects the parts to collect at a step from the step's number, dense sampling, and `stretch`.

    `stretch` multiplies the interval of a part to keep an overhead budget; dense sampling overrides it.
    """

    def __init__(self, config: MonitorConfig, *, several_ranks: bool = False) -> None:
        self._parts = (*PARTS, COMMUNICATION) if several_ranks else PARTS
        self.stretch = dict.fromkeys((*PARTS, COMMUNICATION), 1)
        self.dense = range(0)
        self.adopt(config)

    def adopt(self, config: MonitorConfig) -> None:
        """Follow a configuration from the next plan on."""
        self.start = config.start_step
        self.stop = config.stop_step
        blocks = {part: getattr(config.collect, part) for part in self._parts}
        self.every = {part: block.every for part, block in blocks.items() if block is not None}

    @property
    def stretched(self) -> dict[str, int]:
        """The current interval of each part, in steps."""
        return {part: every * self.stretch[part] for part, every in self.every.items()}

    def covers(self, step: int) -> bool:
        """Whether a step is between the first and the last that are recorded."""
        return self.start <= step and (self.stop is None or step < self.stop)

    def plan(self, step: int) -> Plan:
        """Return the parts to collect at `step`."""
        if not self.covers(step):
            return NOTHING
        if step in self.dense:
            return frozenset(self.every)
        return frozenset(part for part, every in self.every.items() if step % (every * self.stretch[part]) == 0)

    def sample_every_step(self, step: int, steps: int) -> None:
        """Collect all parts for `steps` steps from `step` on."""
        self.dense = range(step, max(self.dense.stop, step + steps))
