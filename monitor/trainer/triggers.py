"""What an incident sets off, granted by the training process at a step boundary."""

import logging
from collections.abc import Callable
from typing import Any, Final

from trainsentry.anomaly.incident import Incident
from trainsentry.anomaly.overflow import OverflowRule
from trainsentry.collectors.guard import Guard
from trainsentry.monitor.config.schema import OnIncident
from trainsentry.monitor.errors import OverflowLimitReached, TrainingStopped
from trainsentry.monitor.ranks.consensus import Proposal, kind_of
from trainsentry.monitor.recorder import messages
from trainsentry.monitor.recorder.link import RecorderLink
from trainsentry.monitor.schedule import Schedule
from trainsentry.monitor.trainer.targeted_dump import PART as DUMP
from trainsentry.monitor.trainer.targeted_dump import TargetedDump

logger = logging.getLogger("trainsentry")

WRITERS: Final = {
    "csv": "csv (the tables)",
    "tensorboard": "tensorboard (the event file)",
    "journal": "journal (incidents.jsonl, anomalies.jsonl, status.json)",
}
"""What the recorder's writers write, for people."""

LOOK_DISTANCE: Final = 10
"""Least number of steps between two closer looks, so that they cost no more than the usual sampling."""

Callback = Callable[[Incident], None]


class Triggers:
    """Hears of incidents and grants what the configuration asks for.

    An incident is acted upon once, when its ranking has settled: when the weights have been looked at since the
    trouble began. Until then, steps are sampled densely, which is what settles it.
    """

    def __init__(self, settings: OnIncident | None, schedule: Schedule, link: RecorderLink, guard: Guard) -> None:
        self.settings = settings
        self.schedule = schedule
        self.link = link
        self.guard = guard
        self.dump: TargetedDump | None = None
        self.incidents: dict[int, Incident] = {}
        self.callbacks: list[Callback] = []
        self.stop: TrainingStopped | None = None
        self.stop_after_dump: int | None = None
        self.stop_before_update = False
        self._acted: set[int] = set()
        self._looked: int | None = None
        self._new: list[int] = []
        self._due: list[int] = []
        self._suspicion = False
        self._settled: dict[int, int] = {}
        self._granted = 0

    def note_action(self, incident_id: int, action: str) -> None:
        """Write down, with the incident, what was done about it."""
        known = self.incidents.get(incident_id)
        if known is not None:
            self.incidents[incident_id] = known.with_action(action)
        self.link.send(messages.ACTION, incident=incident_id, action=action)

    def hear(self, heard: list[dict[str, Any]]) -> None:
        """Take the recorder's messages; what they ask for is granted at the next boundary."""
        for message in heard:
            if message["type"] == messages.INCIDENT:
                self._hear_incident(message)
            elif message["type"] == messages.SUSPICION:
                self._suspicion = True
            elif message["type"] in {messages.FAILURE, messages.TROUBLE}:
                self._hear_trouble(message)
            elif message["type"] == messages.GOES_ON:
                logger.warning("trainsentry: %s goes on", WRITERS.get(message["part"], message["part"]))

    def _hear_trouble(self, message: dict[str, Any]) -> None:
        """Tell of a part of the recorder that failed for good, or that cannot write now."""
        part, text = message["part"], message["message"]
        since = f"from step {message['step']} on" if message["step"] >= 0 else "from the start on"
        if message["type"] == messages.FAILURE:
            logger.error("trainsentry: %s is switched off %s: %s", WRITERS.get(part, part), since, text)
        else:
            name = WRITERS.get(part, part)
            logger.error("trainsentry: %s cannot be written %s, and is tried again: %s", name, since, text)
        self.guard.note_failure(part, text)

    def _hear_incident(self, message: dict[str, Any]) -> None:
        incident = Incident.from_json(message["incident"])
        known = self.incidents.get(incident.id)
        for action in known.actions if known is not None else ():
            incident = incident.with_action(action)
        self.incidents[incident.id] = incident
        if known is None:
            self._new.append(incident.id)
        if message["settled"] and incident.id not in self._acted:
            self._acted.add(incident.id)
            self._due.append(incident.id)
            self._settled[message["settled"]] = incident.id

    def grant(self, next_step: int, *, under_way: int | None = None) -> None:
        """Do what was asked for. `next_step` is the first that is not open yet.

        `under_way` is the step whose update has not happened yet, when this is called in the midst of it.
        """
        self._sample_densely(next_step)
        due, self._due = self._due, []
        for incident_id in due:
            self._act(self.incidents[incident_id], next_step, under_way)

    # ------------------------------------------------------------------ with other ranks

    def proposal(self, next_step: int, costs: tuple[float, ...]) -> Proposal:
        """Return what this rank would like to be decided; the answer comes at the next boundary."""
        dense = 0
        if self.settings is not None and self.settings.sample_every_step_for:
            if self._new:
                dense = next_step + 1 + self.settings.sample_every_step_for
            elif self._suspicion and (self._looked is None or next_step - self._looked >= LOOK_DISTANCE):
                self._looked, dense = next_step, next_step + 2
        self._new, self._suspicion, self._due = [], False, []
        return Proposal(kind_of(self.stop), dense, -max(self._settled, default=0), costs)

    def grant_agreed(self, agreed: Proposal, next_step: int) -> None:
        """Do what all ranks have agreed on."""
        if agreed.dense_until > next_step:
            steps = agreed.dense_until - next_step
            if steps > 1 and self.incidents:
                incident_id = max(self.incidents)
                self.note_action(incident_id, f"sampling every step from step {next_step} on, for {steps} steps")
        for number in range(self._granted + 1, -agreed.unheard + 1):
            incident = self.incidents.get(self._settled.get(number, 0))
            if incident is not None:
                self._act(incident, next_step, None)
        self._granted = max(self._granted, -agreed.unheard)

    def dump_now(self, step: int) -> None:
        """Dump what the step under way still holds, on the rank that is suspected."""
        for incident_id in self._due:
            incident = self.incidents[incident_id]
            if self.dump is not None and incident.rank == self.dump.rank and self.dump.allows(step):
                self.guard.run(DUMP, self.dump.now, incident, step)

    def take_stop(self) -> TrainingStopped | None:
        """Return the stop that this rank asked for, if it did, and forget it."""
        stop, self.stop, self.stop_before_update = self.stop, None, False
        return stop

    def go_back(self) -> None:
        """Forget what was set off for steps that are no longer to come."""
        self.schedule.dense = range(0)
        self._looked = self.stop_after_dump = None
        if self.dump is not None:
            self.guard.run(DUMP, self.dump.go_back)

    def grant_last(self) -> None:
        """Tell the callbacks of incidents that were heard of as the run ended."""
        due, self._due = self._due, []
        for incident_id in due:
            self._announce(self.incidents[incident_id])

    def _sample_densely(self, next_step: int) -> None:
        steps = self.settings.sample_every_step_for if self.settings is not None else 0
        new, self._new = self._new, []
        suspicion, self._suspicion = self._suspicion, False
        if not steps:
            return
        for incident_id in new:
            self.schedule.sample_every_step(next_step, steps)
            self.note_action(incident_id, f"sampling every step from step {next_step} on, for {steps} steps")
        # What was too little for an incident may show its cause when everything is collected at one step.
        if suspicion and (self._looked is None or next_step - self._looked >= LOOK_DISTANCE):
            self._looked = next_step
            self.schedule.sample_every_step(next_step, 1)

    def _act(self, incident: Incident, next_step: int, under_way: int | None) -> None:
        step = next_step if under_way is None else under_way
        dumping = self.dump is not None and self.dump.allows(step)
        stopping = self.settings is not None and self.settings.stop
        if self.dump is not None and dumping:
            if under_way is not None:
                self.guard.run(DUMP, self.dump.now, incident, under_way)
            if under_way is None or not stopping:
                self.guard.run(DUMP, self.dump.arm, incident, next_step)
        self._announce(self.incidents[incident.id])
        if stopping:
            # Between two steps, the dump takes the coming step; the stop waits for it and comes before its update.
            self._stop_for(incident.id, step, after_dump=dumping and under_way is None)

    def _announce(self, incident: Incident) -> None:
        logger.warning("trainsentry: incident %d: %s", incident.id, incident.summary)
        for callback in self.callbacks:
            self._call(callback, incident)

    def _stop_for(self, incident_id: int, step: int, *, after_dump: bool) -> None:
        if after_dump and self.dump is not None and self.dump.last_step is not None:
            step = self.dump.last_step
            self.stop_after_dump = incident_id
        else:
            incident = self.incidents[incident_id]
            self.stop = TrainingStopped(step, incident.summary, incident)
        self.note_action(incident_id, f"stop at step {step}")

    def dump_taken(self, step: int) -> None:
        """Note that the dump has what it needs of `step`: a stop that waited for that is due before the update."""
        if self.stop_after_dump is None or self.dump is None:
            return
        if self.dump.last_step is not None and step < self.dump.last_step and DUMP not in self.guard.disabled:
            return
        self.guard.run(DUMP, self.dump.end_step)
        incident = self.incidents[self.stop_after_dump]
        self.stop_after_dump = None
        self.stop = TrainingStopped(step, incident.summary, incident)
        self.stop_before_update = True

    def _call(self, callback: Callback, incident: Incident) -> None:
        try:
            callback(incident)
        except TrainingStopped:
            raise
        except Exception as error:
            if self.guard.strict:
                raise
            logger.exception("trainsentry: a callback of on_incident failed; training goes on")
            self.guard.note_failure("on_incident", f"{type(error).__name__}: {error}")

    def raise_stop(self) -> None:
        """Raise the stop that was asked for, once.

        Raises:
            TrainingStopped: when an incident, a request or the overflow limit asked for a stop.

        """
        stop = self.take_stop()
        if stop is not None:
            raise stop


class OverflowLimit:
    """Asks for a stop once, when as many steps had an overflow as are allowed; never with -1."""

    def __init__(self, overflow: OverflowRule, nums: int, triggers: Triggers) -> None:
        self.overflow = overflow
        self.nums = nums
        self.triggers = triggers

    def check(self, step: int) -> None:
        """Ask for a stop at `step` if the limit is reached."""
        if self.nums < 0 or self.overflow.count < self.nums or self.triggers.stop is not None:
            return
        incident = max(self.triggers.incidents.values(), key=lambda i: i.id, default=None)
        reason = f"overflow in {self.overflow.count} steps, overflow_nums is {self.nums}"
        self.nums = -1
        self.triggers.stop = OverflowLimitReached(step, reason, incident)
        if incident is not None:
            self.triggers.note_action(incident.id, f"stop at step {step} by overflow_nums")
