"""Writes the tensors of an incident's suspects to disk, within a byte budget and a cool-down."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from trainsentry.anomaly.dumps.dump_comparison import EQUAL, compare_dumps
from trainsentry.anomaly.incident import Incident
from trainsentry.collectors.capture import Replay, StepAgreement, TensorCapture, TensorFiles
from trainsentry.collectors.series import (
    ACTIVATION_GRAD_INPUT,
    ACTIVATION_GRAD_OUTPUT,
    ACTIVATION_OUTPUT,
    GRADIENT,
    GRADIENT_UNREDUCED,
)
from trainsentry.exporters.dumps.dump_reader import RankDump, read_dumps
from trainsentry.exporters.dumps.step_dump import TENSORS, StepDump
from trainsentry.exporters.short_text import counted, first_of
from trainsentry.monitor.config.schema import Dump

PART: Final = "dump"

OVERFLOWS: Final = frozenset({"nonfinite", "overflow"})
"""Kinds of incidents after which the dumped step is also checked for overflowing calls."""


FROM_DATA: Final = frozenset(
    {"data", "loss", "grad_norm", GRADIENT, GRADIENT_UNREDUCED}
    | {ACTIVATION_OUTPUT, ACTIVATION_GRAD_INPUT, ACTIVATION_GRAD_OUTPUT}
)
"""Quantities of first suspects whose trouble may have come in with a batch; weights and state outlive it."""


class TargetedDump:
    """Dumps the tensors of an incident's suspects.

    `now` dumps weights, gradients and optimizer state of the current step; its activations are no longer in memory.
    `arm` dumps whole later steps: activations and their gradients when they are computed, the rest just before the
    update. `capture` finds the framework's tensors, `save` stores them. `done` takes an incident's id and a sentence.
    """

    def __init__(
        self,
        settings: Dump,
        directory: Path,
        *,
        rank: int,
        capture: TensorCapture,
        optimizers: Sequence[Any],
        save: TensorFiles,
        quota: int,
        done: Callable[[int, str], None],
        replay: Replay | None = None,
        overflow_check: bool = False,
    ) -> None:
        self.settings = settings
        self.directory = directory
        self.rank = rank
        self.capture = capture
        self.optimizers = optimizers
        self.save = save
        self.quota = quota
        self.done = done
        self.replay = replay
        self.overflow_check = overflow_check
        self._check: tuple[StepDump, Any] | None = None
        self._broken: list[str] = []
        self.total_bytes = 0
        self._last_step: int | None = None
        self._budget = 0
        self._incident: Incident | None = None
        self._until = -1
        self._step_dump: StepDump | None = None
        self._step = -1
        self._tensors = 0
        self._left_out: list[str] = []
        self._held: dict[str, dict[str, Any]] = {}

    @property
    def last_step(self) -> int | None:
        """The last step that will be dumped, or None when nothing is armed."""
        return None if self._incident is None or self._until < 0 else self._until - 1

    def allows(self, step: int) -> bool:
        """Whether a new dump may begin at `step`."""
        if self.total_bytes >= self.quota or self._incident is not None:
            return False
        return self._last_step is None or step - self._last_step >= self.settings.cooldown_steps

    def now(self, incident: Incident, step: int) -> None:
        """Dump weights, gradients and optimizer state of the current step."""
        self._begin(incident, step)
        self._step_dump = self._open(step)
        self._take_held()
        self._write()

    def arm(self, incident: Incident, step: int) -> None:
        """Dump whole steps from `step` on, which is the next step to open."""
        if self._incident is None:
            self._begin(incident, step)
        self._until = step + self.settings.steps

    def batch(self, incident: Incident, steps_back: int) -> None:
        """Dump the inputs of an incident's own step, so many steps ago, while they are still there."""
        pieces = self.capture.inputs(steps_back)
        if not pieces or self._incident is not None or self.total_bytes >= self.quota:
            return
        self._incident, self._budget = incident, min(self.settings.max_bytes, self.quota - self.total_bytes)
        self._step_dump = self._open(incident.step)
        for piece in pieces:
            self._keep(piece)
        self._write()
        self._incident = None

    def open_step(self, step: int) -> None:
        """Hook the suspects' modules for the next step, if it is to be dumped."""
        self.capture.close()
        if self._incident is None:
            return
        if step >= self._until:
            self._incident = None
            return
        self._step_dump = self._open(step)
        self.capture.attach(self._modules(), self._step_dump, self._may_save)
        if self.overflow_check and self._incident.kind in OVERFLOWS:
            folder = self.directory.parent / "overflow" / f"step{step}" / f"rank{self.rank}"
            head = {**self._head(folder, step), "task": "overflow_check", "dump_data_dir": None}
            checked = StepDump(folder, head)
            self._broken = self.capture.nonfinite_weights()
            self._check = (checked, self.capture.check_overflow(checked))

    def before_update(self, step: int) -> None:
        """Add weights, gradients and optimizer state to the dump of `step`, if there is one."""
        if self._step_dump is not None and self._step == step:
            self._take_held()

    def end_step(self) -> None:
        """Write the dump of the step that has ended, if there is one."""
        self.capture.close()
        if self._step_dump is not None:
            self._write()
        self._end_check()

    def abandon(self) -> None:
        """Give up the current dump: remove its hooks and keep the files written so far."""
        current, self._step_dump, self._incident = self._step_dump, None, None
        self.capture.close()
        check, self._check = self._check, None
        for dump in (current, check[0] if check is not None else None):
            if dump is not None:
                dump.close()

    def go_back(self) -> None:
        """Give up the armed dump; the next one may begin within the cool-down of the last."""
        self.abandon()
        self._last_step = None

    def _end_check(self) -> None:
        """Write the result of the step's overflow check."""
        check, self._check = self._check, None
        if check is None:
            return
        dump, task = check
        calls, first, _ = task.take_counts()
        found = [f"the step began with NaN or Inf in {first_of(self._broken)}"] if self._broken else []
        if calls:
            dump.close()
            where = dump.directory.relative_to(self.directory.parent)
            found.append(f"{where} ({calls} overflowing calls, the first {first})")
        else:
            dump.discard()
        if self._incident is not None and found:
            self.done(self._incident.id, f"overflow check: {'; '.join(found)}")

    def _begin(self, incident: Incident, step: int) -> None:
        self._incident = incident
        self._last_step = step
        self._budget = min(self.settings.max_bytes, self.quota - self.total_bytes)
        if self.replay is not None:
            self.done(incident.id, f"replay: {self._run_again(self.replay, step)}")

    def _run_again(self, replay: Replay, step: int) -> str:
        """Run the last forward pass twice; return a sentence on whether these and the step's own results are equal."""
        folders = [self.directory / f"step{step}" / f"rank{self.rank}" / f"replay{i}" for i in range(2)]
        writers = [StepDump(folder, self._head(folder, step)) for folder in folders]
        try:
            outcome = replay.run(self._modules(), writers)
        except Exception as error:  # noqa: BLE001 - the user's forward pass may raise anything
            outcome = f"failed: {type(error).__name__}: {error}"
        if outcome != "done" or not all(writer.names for writer in writers):
            for writer in writers:
                writer.discard()
            if outcome != "done":
                return outcome
            return (
                f"no dump, as the forward pass uses none of the suspects; {_of_the_step(*replay.compare_with_step())}"
            )
        for writer in writers:
            writer.close()
        self.total_bytes += sum(f.stat().st_size for folder in folders for f in folder.rglob("*") if f.is_file())
        first, second = (read_dumps(folder)[0] for folder in folders)
        return verdict_on_replays(first, second, replay.compare_with_step)

    def _open(self, step: int) -> StepDump:
        assert self._incident is not None
        self._step, self._tensors, self._left_out, self._held = step, 0, [], {}
        directory = self.directory / f"step{step}" / f"rank{self.rank}"
        return StepDump(directory, self._head(directory, step))

    def _head(self, directory: Path, step: int) -> dict[str, Any]:
        """Return the first members of `dump.json`."""
        assert self._incident is not None
        return {
            "task": "tensor",
            "level": "mix",
            "framework": self.capture.framework,
            "step": step,
            "moment": "before_update",
            "incident": self._incident.id,
            "dump_data_dir": str(directory / TENSORS),
        }

    def _take_held(self) -> None:
        for module in self._modules():
            for piece in self.capture.model_tensors({module}, self.optimizers):
                self._keep(piece)
        if self._incident is not None and self._incident.quantity in FROM_DATA:
            for piece in self.capture.inputs():
                self._keep(piece)

    def _modules(self) -> list[str]:
        """Return the suspects' modules, the first suspect's first."""
        assert self._incident is not None
        return list(dict.fromkeys(s.module for s in self._incident.suspects if not s.is_scalar))

    def _keep(self, piece: Any) -> None:
        """Save one weight, gradient or state tensor, unless the dump has it or the budget is spent."""
        dump = self._step_dump
        if dump is None or piece.entry in dump.names:
            return
        name = piece.stem + self.save.SUFFIX
        if not self._may_save(name, piece.tensor):
            return
        path = dump.tensor_path(name)
        self.save.save_tensor(piece.tensor, path)
        described = {**self.capture.describe(piece.tensor), "data_name": path.name}
        entry = self._held.setdefault(piece.entry, {})
        if piece.group in {"parameters", "input_args"} and not entry:
            entry.update(input_args=[], input_kwargs={}, output=[], parameters={})
        if piece.group == "parameters":
            entry["parameters"][piece.key] = described
        elif piece.group == "input_args":
            entry["input_args"].append(described)
        else:
            entry.setdefault(piece.key, []).append(described)

    def _may_save(self, name: str, tensor: Any) -> bool:
        """Take a tensor's size from the budget; if too little is left, note the tensor as left out."""
        size = self.save.stored_bytes(tensor)
        if size > self._budget:
            self._left_out.append(name)
            return False
        self._budget -= size
        self.total_bytes += size
        self._tensors += 1
        return True

    def _write(self) -> None:
        dump, self._step_dump = self._step_dump, None
        if dump is None or self._incident is None:
            return
        for name, content in self._held.items():
            dump.entry(name, content)
        if not dump.names:
            dump.discard()
            return
        dump.close({"holds": sorted({_kind(name) for name in dump.names}), "left_out": self._left_out})
        where = dump.directory.relative_to(self.directory.parent)
        self.done(self._incident.id, f"dump: {where} ({counted(self._tensors, 'tensor')})")


def verdict_on_replays(a: RankDump, b: RankDump, compare_with_step: Callable[[], tuple[StepAgreement, str]]) -> str:
    """Return the conclusion from two runs of one forward pass, and from comparing them with the step if they are equal.

    Equal results rule out a device's lasting fault, and a passing one if the step's own are equal too.
    """
    for row in compare_dumps(a, b, {}):
        if row.status != EQUAL:
            return (
                f"two runs of the same forward pass first differ at {row.call} ({row.place}): the device is faulty, "
                f"or an operation is not deterministic; {a.directory} and {b.directory}"
            )
    compared, detail = compare_with_step()
    if compared is StepAgreement.EQUAL:
        return (
            "two runs of the same forward pass and the step's own outputs are bitwise equal: the cause is data or "
            f"numerics, not the device; {a.directory}"
        )
    return f"two runs of the same forward pass are bitwise equal; {_of_the_step(compared, detail)}; {a.directory}"


def _of_the_step(compared: StepAgreement, detail: str) -> str:
    """Return in words how a repeated forward pass compares with what the step itself computed."""
    if compared is StepAgreement.DIFFERENT:
        return (
            f"the step computed something else than its inputs and weights give: {detail}. The device had a passing "
            "fault, or memory was overwritten since, unless the pass depends on what torch does not see"
        )
    if compared is StepAgreement.NOT_MADE:
        return f"they were not compared with what the step computed: {detail}. A passing fault is not ruled out"
    if compared is StepAgreement.NOT_REPEATABLE:
        return "two more runs give different outputs: the device is faulty, or an operation is not deterministic"
    return "a re-run gives the outputs of the step to the bit: the cause is data or numerics, not the device"


def _kind(name: str) -> str:
    """Return the kind of tensors in an entry: `forward`, `backward`, `parameters_grad` or `optimizer_state`."""
    parts = name.rsplit(".", 2)
    return parts[-1] if parts[-1] in {"forward", "backward"} else parts[-2]
