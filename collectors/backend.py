"""What the monitor asks of a framework: `collectors/torch` and `collectors/mindspore` each answer it with a `backend`.

`Model`, `Optimizer` and `Tensor` are the framework's own, so their type here is Any.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from trainsentry.collectors.calls.dump_entries import DumpedTensorPlace, EntryWriter
from trainsentry.collectors.guard import Guard
from trainsentry.collectors.series import SeriesTable
from trainsentry.collectors.settings import CollectSettings, Plan
from trainsentry.collectors.shared.host_rows import PendingRows
from trainsentry.collectors.shared.model_graph import DataFlow

# ---------------------------------------------------------------------- steps


class StepListener(Protocol):
    """What is told about the steps of the watched optimizers. Its methods contain their own failures."""

    def before_optimizer(self, optimizer: Any, *, has_closure: bool) -> None:
        """An optimizer is about to update; with a closure its gradients are not there yet."""

    def after_optimizer(self, optimizer: Any) -> None:
        """An optimizer has updated."""

    def after_part(self, optimizer: Any) -> None:
        """An optimizer has updated a part of its parameters; more may follow before `after_optimizer`."""

    def update_refused(self, optimizer: Any) -> None:
        """An optimizer met a value that is not finite and did not update, though it searches for no loss scale."""

    def scaler_entered(self, scaler: Any, optimizer: Any) -> None:
        """A loss scaler is about to step an optimizer, or to skip it."""

    def scaler_skipped(self, scaler: Any, optimizer: Any) -> None:
        """A loss scaler has decided not to call the optimizer."""


class OptimizerSteps(Protocol):
    """Hooks that tell a `StepListener` where each optimizer's step begins and ends."""

    @property
    def optimizers(self) -> Sequence[Any]:
        """The optimizers whose steps are told."""

    def have_told(self) -> bool:
        """Whether the optimizers tell where steps end; asked once a step."""

    def close(self) -> None:
        """Remove every hook."""


# ---------------------------------------------------------------------- ranks


class Store(Protocol):
    """Where ranks leave texts for each other that are read without waiting for anyone's training."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def put(self, key: str, text: str) -> None:
        """Leave a text."""

    def all(self, prefix: str) -> dict[int, str]:
        """Return the texts that ranks left under `<prefix>/<rank>`, by rank."""


class Rendezvous(Protocol):
    """The ranks of a run, all of which take part, watched or not. `secret` is known to no one else."""

    rank: int
    size: int
    secret: str

    @property
    def store(self) -> Store:
        """Where ranks leave texts for each other."""

    @property
    def name(self) -> str:
        """The name of the group that the monitor talks over, "" for none of the framework's."""

    def exchange(self, mine: Any) -> list[Any]:
        """Return what every rank gives, in the order of ranks."""

    def close(self, *, broken: bool = False) -> None:
        """Leave; after a failed exchange (`broken`) without waiting for anyone."""


class MaxReduce(Protocol):
    """Finds the element-wise maximum of what the ranks propose, while their steps go on."""

    def propose(self, values: Sequence[float]) -> None:
        """Begin to agree on values, as many on every rank."""

    def result(self) -> list[float] | None:
        """Return the maximum of each value, waiting for the other ranks; None when nothing was proposed.

        Raises:
            RuntimeError: when a rank has not proposed anything in time.

        """


# ---------------------------------------------------------------------- a watched model


class StepRows(Protocol):
    """The rows of the current step."""

    def __len__(self) -> int: ...

    def peek(self) -> PendingRows:
        """Return the rows so far and keep them."""

    def drop(self) -> None:
        """Start anew."""


class TensorCapture(Protocol):
    """Whole tensors of chosen modules, for a targeted dump."""

    @property
    def framework(self) -> str:
        """The framework's name in `dump.json`."""

    def attach(self, modules: Collection[str], writer: EntryWriter, may_save: Callable[[str, Any], bool]) -> None:
        """Describe the calls of modules, and save the tensors that `may_save` admits."""

    def check_overflow(self, writer: EntryWriter) -> Any:
        """Record every call of the coming step that overflows."""

    def held(self, modules: Collection[str], optimizers: Sequence[Any]) -> Iterator[DumpedTensorPlace]:
        """Yield parameters, gradients and optimizer state of modules as they stand."""

    def describe(self, tensor: Any) -> dict[str, Any]:
        """Return a tensor's entry in `dump.json`."""

    def close(self) -> None:
        """Remove every hook."""


class Replay(Protocol):
    """Runs the last forward pass again."""

    def run(self, modules: Collection[str], writers: Collection[EntryWriter]) -> str:
        """Write what modules gave in each run; return what the runs show."""


class ModelWatch(Protocol):
    """A watched model: reads it around the steps of its optimizers.

    The order of calls: `add`, `listen`, then in each step `open_step`, `before_update` and `after_update` for each
    optimizer, `end_step`, `take`.
    """

    optimizers: list[Any]
    own_group: str

    @property
    def rows(self) -> StepRows:
        """The rows of the current step."""

    @property
    def flow(self) -> DataFlow:
        """Which module feeds which, as far as it is known."""

    @property
    def capture(self) -> TensorCapture:
        """Whole tensors of chosen modules."""

    @property
    def on_host(self) -> bool:
        """Whether the host holds every parameter, so that values are there without waiting."""

    @property
    def takes_boundaries(self) -> bool:
        """Whether only the optimizers' calls tell where steps end."""

    @property
    def step_has_ended(self) -> bool:
        """Whether the optimizers' calls have ended the step already; asked once a step."""

    @property
    def data_parallel(self) -> bool:
        """Whether every rank has data of its own."""

    @property
    def seconds_waited(self) -> float | None:
        """Seconds of this step spent in waiting for collectives; None where they are not seen."""

    @property
    def micro_steps(self) -> int:
        """Micro-steps seen in this step; 0 where activations were not sampled."""

    @property
    def left_out(self) -> int:
        """Passes and calls beyond what a record holds."""

    def add(self, model: Any, optimizer: Any, grad_scaler: Any) -> None:
        """Check and take models and optimizers.

        Raises:
            TypeError: for objects of another kind.
            ValueError: for a model without parameters, one that is watched already, an optimizer of another model, or
                a pattern that matches nothing.

        """

    def listen(self, listener: StepListener) -> None:
        """Tell a listener of the optimizers' steps from here on, those of models that are added later included."""

    def watch_communication(self) -> None:
        """Watch collectives too, but for those of the monitor's own group."""

    def replay(self) -> Replay | None:
        """Return what keeps the last forward pass and runs it again, None where the framework cannot."""

    def graph(self) -> dict[str, Any]:
        """Return the content of `graph.json`."""

    def open_step(self, plan: Plan) -> None:
        """Prepare the next step: attach the hooks that its plan needs."""

    def before_update(self, optimizer: Any, *, gradients_ready: bool = True) -> None:
        """Read the gradients, parameters and state that the coming update starts from."""

    def after_update(self, optimizer: Any, *, gradients_ready: bool = False) -> None:
        """Read the update; also the gradients, where a closure computed them inside the step."""

    def after_part(self, optimizer: Any) -> None:
        """Read the update of a part of an optimizer's parameters."""

    def skipped(self, optimizer: Any) -> None:
        """Read a step that was skipped: as before an update, with none to follow."""

    def without_optimizer(self) -> None:
        """Read a step that ends without any optimizer's call."""

    def examine(self) -> None:
        """Read, out of turn, every parameter and all optimizer state not yet read in this step."""

    def log(self, name: str, value: Any, micro_step: int) -> None:
        """Append a scalar."""

    def note_loss_scale(self, scaler: Any) -> None:
        """Append the scaler's current scale."""

    def take_call_order(self) -> int | None:
        """Return a number that stands for this step's collectives, the same on every rank; None when unknown."""

    def doing(self) -> dict[str, Any]:
        """Return the collective that this rank waits in, and those that are open; called from another thread."""

    def end_step(self) -> None:
        """Complete the rows of the step."""

    def take(self) -> PendingRows:
        """Return the rows of the step, or of its part since the last call."""

    def stop_reading(self) -> None:
        """Remove every hook but those that tell of the optimizers' steps."""

    def close(self) -> None:
        """Remove every hook and patch."""


# ---------------------------------------------------------------------- the framework


class TensorFiles(Protocol):
    """How tensors are saved."""

    @property
    def SUFFIX(self) -> str:  # noqa: N802 - a constant of a module
        """Of the files' names."""

    def save_tensor(self, tensor: Any, path: Path) -> None:
        """Write a tensor to a file."""

    def stored_bytes(self, tensor: Any) -> int:
        """Return how many bytes a tensor's file has, without its header."""


class Framework(Protocol):
    """A framework's `backend` module."""

    @property
    def saving(self) -> TensorFiles:
        """How tensors are saved."""

    def new_watch(self, table: SeriesTable, guard: Guard, settings: CollectSettings) -> ModelWatch:
        """Return a watch that watches nothing yet."""

    def follow(self, model: Any, optimizer: Any, grad_scaler: Any, listener: StepListener) -> OptimizerSteps:
        """Tell a listener of the optimizers' steps, on a rank where nothing is read.

        Raises:
            TypeError, ValueError: as `ModelWatch.add` does.

        """

    def rank_and_world_size(self) -> tuple[int, int]:
        """Return this process's rank and the number of ranks."""

    def describe_environment(self) -> Mapping[str, Any]:
        """Return the framework, its version and the accelerator, for `run.json`."""

    def meet(self) -> Rendezvous | None:
        """Wait until every rank has come; return None for a single rank, or where ranks cannot talk."""

    def max_reduce(self, rendezvous: Any, max_wait: float) -> MaxReduce:
        """Return a maximum over the ranks that waits at most `max_wait` seconds."""
