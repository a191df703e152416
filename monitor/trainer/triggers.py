"""Acts on incidents at step boundaries: samples densely, dumps, calls back, stops."""

import logging
from collections.abc import Callable
from typing import Any, Final

from trainsentry.anomaly.incident import Incident
from trainsentry.anomaly.learned_state import LEARNED_STATE
from trainsentry.anomaly.overflow import OverflowRule
from trainsentry.collectors.guard import Guard
from trainsentry.exporters.short_text import counted
from trainsentry.monitor.config.schema import OnIncident
from trainsentry.monitor.errors import OverflowLimitReached, TrainingStopped
from trainsentry.monitor.ranks.consensus import Consensus, Proposal, kind_of
from trainsentry.monitor.recorder import messages
from trainsentry.monitor.recorder.link import RecorderLink
from trainsentry.monitor.trainer.batch_check import BatchCheck
from trainsentry.monitor.trainer.targeted_dump import FROM_DATA, TargetedDump
from trainsentry.monitor.trainer.targeted_dump import PART as DUMP

logger = logging.getLogger("trainsentry")

PARTS: Final = {
    "csv": "csv (the tables)",
    "tensorboard": "tensorboard (the event file)",
    "journal": "journal (incidents.jsonl, anomalies.jsonl, status.json)",
    LEARNED_STATE: f"{LEARNED_STATE} (what the detectors know of the past; they begin without it)",
}
"""The names of the recorder's parts in log messages, where a word says too little."""

SUSPICION_DISTANCE: Final = 10
"""Fewest steps between two steps sampled for a suspicion, so that they cost no more than the default sampling."""

NOT_FINITE: Final = frozenset({"nonfinite", "overflow"})
SAID_EVERY: Final = 1000
"""Steps after which an incident is logged again whose kind is one of these, as long as it lasts."""

Callback = Callable[[Incident], None]


class Triggers:
    """Acts once on each incident, as configured.

    `receive` takes an incident from the recorder, `proposal` counts it, the ranks agree that all of them have received
    it (a single rank agrees at once), and `act_on` acts on it. A new incident makes the sampling dense, so that weights
    are read and its ranking settles. Incidents are logged where `speaks`: on one rank of those that agree. `lag` is the
    steps and seconds by which the recorder was late at most.
    """

    def __init__(self, settings: OnIncident | None, consensus: Consensus, link: RecorderLink, guard: Guard) -> None:
        self.settings = settings
        self.consensus = consensus
        self.link = link
        self.guard = guard
        self.dump: TargetedDump | None = None
        self.batches: BatchCheck | None = None
        self.incidents: dict[int, Incident] = {}
        self.speaks = True
        self.output_dir = ""
        self.lag = (0, 0.0)
        self._said: dict[int, int] = {}
        self.callbacks: list[Callback] = []
        self.stop: TrainingStopped | None = None
        self.stop_after_dump: int | None = None
        self.stop_before_update = False
        self._suspected_at: int | None = None
        self._suspicion = False
        self._new: list[int] = []
        self._proposed: list[int] = []
        self._settled_ids: set[int] = set()
        self._last_settled = 0
        self._waiting: dict[int, int] = {}
        self._just_settled: list[int] = []

    # ------------------------------------------------------------------ receive

    def receive(self, received: list[dict[str, Any]]) -> None:
        """Take the recorder's messages; `act_on` acts on them."""
        for message in received:
            if message["type"] == messages.INCIDENT:
                self._receive_incident(message)
            elif message["type"] == messages.SUSPICION:
                self._suspicion = True
            elif message["type"] == messages.LAG:
                self._report_lag(int(message["steps"]), float(message["seconds"]))
            elif message["type"] in {messages.FAILURE, messages.TROUBLE}:
                self._report_trouble(message)
            elif message["type"] == messages.GOES_ON:
                logger.warning("trainsentry: %s can be written again", PARTS.get(message["part"], message["part"]))

    def _receive_incident(self, message: dict[str, Any]) -> None:
        incident = Incident.from_json(message["incident"])
        known = self.incidents.get(incident.id)
        for action in known.actions if known is not None else ():
            incident = incident.with_action(action)
        self.incidents[incident.id] = incident
        if known is None:
            self._new.append(incident.id)
            if self.batches is not None and incident.quantity in FROM_DATA:
                self.batches.look(incident)
        self._say_again(incident)
        if message["settled"] and incident.id not in self._settled_ids:
            # A recorder that took over from one that died counts from 1 again.
            self._last_settled = max(message["settled"], self._last_settled + 1)
            self._waiting[self._last_settled] = incident.id
            self._settled_ids.add(incident.id)
            self._just_settled.append(incident.id)

    def _report_lag(self, steps: int, seconds: float) -> None:
        """Log, once, that the recorder is behind the training."""
        if not self.lag[0]:
            logger.warning(
                "trainsentry: the recorder is %s (%.1f s) behind the training, so alarms come later by as much. Give "
                "it a free core, or sample less: larger collect.<part>.every, or overhead_budget",
                counted(steps, "step"),
                seconds,
            )
        self.lag = max(self.lag, (steps, seconds), key=lambda each: each[1])

    def _report_trouble(self, message: dict[str, Any]) -> None:
        """Log that a part of the recorder failed, or that it cannot write now."""
        part, text = message["part"], message["message"]
        name = PARTS.get(part, part)
        since = f"from step {message['step']} on" if message["step"] >= 0 else "from the start"
        if message["type"] == messages.FAILURE:
            logger.error("trainsentry: %s is off %s: %s", name, since, text)
        else:
            logger.error("trainsentry: %s cannot be written %s, retrying: %s", name, since, text)
        self.guard.note_failure(part, text)

    def note_action(self, incident_id: int, action: str) -> None:
        """Add an action to an incident, here and in the recorder; one that a user requested is logged."""
        if incident_id < 0:
            logger.warning("trainsentry: %s", action)
            return
        known = self.incidents.get(incident_id)
        if known is not None:
            self.incidents[incident_id] = known.with_action(action)
        self.link.send(messages.ACTION, incident=incident_id, action=action)

    # ------------------------------------------------------------------ agree

    def proposal(self, next_step: int, costs: tuple[float, ...] = (), commands: int = 0) -> Proposal:
        """Return this rank's proposal; `next_step` is the first step that is not open yet."""
        self._proposed, self._new, self._just_settled = self._new, [], []
        suspicion, self._suspicion = self._suspicion, False
        steps = self.settings.sample_every_step_for if self.settings is not None else 0
        if steps and not self._proposed:
            # A suspicion is too little for an incident; one step with everything sampled may show its cause.
            rested = self._suspected_at is None or next_step - self._suspected_at >= SUSPICION_DISTANCE
            steps = 1 if suspicion and rested else 0
            self._suspected_at = next_step if steps else self._suspected_at
        dense = next_step + self.consensus.delay + steps if steps else 0
        return Proposal(kind_of(self.stop), dense, -self._last_settled, costs, commands=commands)

    def act_before_update(self, step: int) -> None:
        """Act on incidents that settled in `step`, whose update has not happened yet.

        A single rank decides now. Several ranks decide at the boundary, so here only the suspected rank dumps, and only
        the tensors that the update is about to change.
        """
        just_settled = self._just_settled
        if self.consensus.is_single_rank:
            agreed = self.consensus.at_boundary(step, self.proposal(step + 1))
            self.act_on(agreed, step + 1, under_way=step)
            return
        for incident_id in just_settled:
            incident = self.incidents[incident_id]
            if self.dump is not None and incident.rank == self.dump.rank and self.dump.allows(step):
                self.guard.run(DUMP, self.dump.now, incident, step)

    # ------------------------------------------------------------------ act

    def act_on(self, agreed: Proposal | None, next_step: int, *, under_way: int | None = None) -> None:
        """Act on the ranks' agreement; `next_step` is the first step that is not open yet.

        Before an update, `under_way` is the current step; at a boundary it is None.
        """
        if agreed is None:
            return
        self._note_dense_sampling(agreed.dense_until - next_step, next_step)
        for number in [n for n in self._waiting if n <= -agreed.minus_settled]:
            self._act(self.incidents[self._waiting.pop(number)], next_step, under_way)

    def _note_dense_sampling(self, steps: int, next_step: int) -> None:
        """Add the next `steps` of dense sampling to their incidents; a suspicion's single step has none."""
        if self.consensus.is_single_rank:
            about = self._proposed if steps > 0 else []
        else:  # the answer is to an earlier proposal, perhaps of another rank
            about = [max(self.incidents)] if steps > 1 and self.incidents else []
        for incident_id in about:
            self.note_action(incident_id, f"sampling every step from step {next_step} on, for {counted(steps, 'step')}")

    def _act(self, incident: Incident, next_step: int, under_way: int | None) -> None:
        step = next_step if under_way is None else under_way
        dumping = self.dump is not None and self.dump.allows(step)
        stopping = self.settings is not None and self.settings.stop
        if self.dump is not None and dumping:
            if under_way is not None:
                self.guard.run(DUMP, self.dump.now, incident, under_way)
            if under_way is None or not stopping:
                self.guard.run(DUMP, self.dump.arm, incident, next_step)
        self._announce(self.incidents[incident.id], dumping=dumping)
        if stopping:
            # Between two steps, the dump takes the coming step; the stop waits for it and comes before its update.
            self._stop_for(incident.id, step, after_dump=dumping and under_way is None)

    def _announce(self, incident: Incident, *, dumping: bool = False) -> None:
        """Log an incident, once a job, with what to do next, and call the callbacks."""
        self._said[incident.id] = incident.last_seen
        if self.speaks:
            tensors = f"; its tensors are dumped to {self.output_dir}/dump" if dumping else ""
            text = f"{incident.summary} Next: trainsentry report {self.output_dir}{tensors}"
            logger.warning("trainsentry: incident %d: %s", incident.id, text)
        for callback in self.callbacks:
            self._call(callback, incident)

    def _say_again(self, incident: Incident) -> None:
        """Log an announced incident again where values still are not finite, `SAID_EVERY` steps later."""
        said = self._said.get(incident.id)
        if said is None or incident.kind not in NOT_FINITE or incident.last_seen - said < SAID_EVERY:
            return
        self._said[incident.id] = incident.last_seen
        if self.speaks:
            text = f"still at step {incident.last_seen}: {incident.summary}"
            logger.warning("trainsentry: incident %d, %s", incident.id, text)

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

    def announce_rest(self) -> None:
        """Announce the incidents that settled as the run ended, too late to act on them."""
        while self._waiting:
            self._announce(self.incidents[self._waiting.pop(next(iter(self._waiting)))])

    # ------------------------------------------------------------------ stop

    def _stop_for(self, incident_id: int, step: int, *, after_dump: bool) -> None:
        """Request a stop at `step`, or when the dump that begins there is complete."""
        if after_dump and self.dump is not None and self.dump.last_step is not None:
            step = self.dump.last_step
            self.stop_after_dump = incident_id
        else:
            incident = self.incidents[incident_id]
            self.stop = TrainingStopped(step, incident.summary, incident)
        self.note_action(incident_id, f"stop at step {step}")

    def dump_taken(self, step: int) -> None:
        """Note that the dump of `step` is complete: a stop that waited for it comes before the update."""
        if self.stop_after_dump is None or self.dump is None:
            return
        if self.dump.last_step is not None and step < self.dump.last_step and DUMP not in self.guard.disabled:
            return
        self.guard.run(DUMP, self.dump.end_step)
        incident = self.incidents[self.stop_after_dump]
        self.stop_after_dump = None
        self.stop = TrainingStopped(step, incident.summary, incident)
        self.stop_before_update = True

    def take_stop(self) -> TrainingStopped | None:
        """Return the stop that this rank requested, if any, and forget it."""
        stop, self.stop, self.stop_before_update = self.stop, None, False
        return stop

    def go_back(self) -> None:
        """Forget dense sampling, a waiting stop and an armed dump, as the steps run again."""
        self.consensus.schedule.dense = range(0)
        self._suspected_at = self.stop_after_dump = None
        if self.dump is not None:
            self.guard.run(DUMP, self.dump.go_back)


class OverflowLimit:
    """Requests a stop, once, when `nums` steps had an overflow; never with -1."""

    def __init__(self, overflow: OverflowRule, nums: int, triggers: Triggers) -> None:
        self.overflow = overflow
        self.nums = nums
        self.triggers = triggers

    def check(self, step: int) -> None:
        """Request a stop at `step` if the limit is reached."""
        if self.nums < 0 or self.overflow.count < self.nums or self.triggers.stop is not None:
            return
        incident = max(self.triggers.incidents.values(), key=lambda i: i.id, default=None)
        reason = f"overflow in {counted(self.overflow.count, 'step')}, overflow_nums is {self.nums}"
        self.nums = -1
        self.triggers.stop = OverflowLimitReached(step, reason, incident)
        if incident is not None:
            self.triggers.note_action(incident.id, f"stop at step {step} by overflow_nums")
