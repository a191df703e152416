"""What an incident sets off, granted by the training process at a step boundary."""

import logging
from collections.abc import Callable
from typing import Any

from trainsentry.anomaly.incident import Incident
from trainsentry.collectors.guard import Guard
from trainsentry.monitor.config import OnIncident
from trainsentry.monitor.errors import TrainingStopped
from trainsentry.monitor.recorder import messages
from trainsentry.monitor.recorder.link import RecorderLink
from trainsentry.monitor.schedule import Schedule
from trainsentry.monitor.targeted_dump import PART as DUMP
from trainsentry.monitor.targeted_dump import TargetedDump

logger = logging.getLogger("trainsentry")

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

    def note_action(self, incident_id: int, action: str) -> None:
        """Write down, with the incident, what was done about it."""
        known = self.incidents.get(incident_id)
        if known is not None:
            self.incidents[incident_id] = known.with_action(action)
        self.link.send(messages.ACTION, incident=incident_id, action=action)

    def hear(self, heard: list[dict[str, Any]], step: int, *, in_step: bool) -> None:
        """Take the recorder's messages. `step` is under way when `in_step`, else it is about to begin."""
        for message in heard:
            if message["type"] == messages.INCIDENT:
                self._hear_incident(message, step, in_step=in_step)
            elif message["type"] == messages.FAILURE:
                part, text = message["part"], message["message"]
                logger.error("trainsentry: %s is switched off from step %s on: %s", part, message["step"], text)
                self.guard.note_failure(part, text)

    def _hear_incident(self, message: dict[str, Any], step: int, *, in_step: bool) -> None:
        incident = Incident.from_json(message["incident"])
        known = self.incidents.get(incident.id)
        for action in known.actions if known is not None else ():
            incident = incident.with_action(action)
        self.incidents[incident.id] = incident
        if known is None and self.settings is not None and self.settings.sample_every_step_for:
            first = step + in_step
            self.schedule.sample_every_step(first, self.settings.sample_every_step_for)
            self.note_action(
                incident.id, f"sampling every step {first}-{first + self.settings.sample_every_step_for - 1}"
            )
        if message["settled"] and incident.id not in self._acted:
            self._acted.add(incident.id)
            self._act(self.incidents[incident.id], step, in_step=in_step)

    def _act(self, incident: Incident, step: int, *, in_step: bool) -> None:
        logger.warning("trainsentry: incident %d: %s", incident.id, incident.summary)
        dumping = self.dump is not None and self.dump.allows(step)
        stopping = self.settings is not None and self.settings.stop
        if self.dump is not None and dumping:
            if in_step:
                self.guard.run(DUMP, self.dump.now, incident, step)
            if not (in_step and stopping):
                self.guard.run(DUMP, self.dump.arm, incident, step + in_step)
        for callback in self.callbacks:
            self._call(callback, self.incidents[incident.id])
        if stopping:
            # Out of a step, the dump takes the coming step; the stop waits for it and comes before its update.
            later = dumping and not in_step
            self._stop_for(incident.id, step, after_dump=later)

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
        if self.stop is not None:
            stop, self.stop, self.stop_before_update = self.stop, None, False
            raise stop
