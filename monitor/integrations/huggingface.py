"""A callback for the Trainer of Hugging Face transformers, and for trainers that derive from it (trl, peft)."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from transformers import TrainerCallback

from trainsentry.collectors.torch.sharding.ddp import wrapper_around
from trainsentry.exporters.files.foreign_files import InputError, read_object
from trainsentry.exporters.files.json_files import replace_json
from trainsentry.monitor.integrations.callback_monitor import CallbackMonitor, ConfigSource

LOG_DIGITS: Final = 4
"""Digits to which older Trainers round the loss of their log; a rounded one is no second look at it."""

NOT_OF_TRAINING: Final = re.compile(r"epoch|learning_rate|eval_|train_|num_|total_|.*(_time|runtime|_per_second)$")
"""Names in the Trainer's log of what is no number of a training step: evaluations, counters, rates and times."""


class HFCallback(TrainerCallback):  # type: ignore[misc] # read without its types
    """Watches `Trainer.train()`: steps, loss, gradient norm, checkpoints, incidents and stops.

    >>> Trainer(model, arguments, callbacks=[HFCallback({"on_incident": {"stop": True}})])  # doctest: +SKIP

    The loss of each micro-batch is taken from the model's output, other numbers from the Trainer's log. A
    checkpoint gets a file with the detectors' state, and `resume_from_checkpoint` goes on with it. A stop sets
    `control.should_training_stop` at the end of its step; `stopped` then says why. `monitor` is the `TrainMonitor`
    while it trains, and `incidents` is what it has found, after the training too. Incidents stand in the Trainer's
    `state.log_history` and log.

    Raises:
        ConfigError: for an unknown key or a value that is not allowed.

    """

    def __init__(self, config: ConfigSource = None) -> None:
        self._callback = CallbackMonitor(config)
        self._loss_hook: Any = None
        self._logged_loss = False
        self._incidents = 0

    @property
    def monitor(self) -> Any:
        """The `TrainMonitor` while the Trainer trains, else None."""
        return self._callback.monitor

    @property
    def incidents(self) -> Any:
        """The `Incident`s of this training so far, worst first; after the training too."""
        return self._callback.incidents

    @property
    def stopped(self) -> Any:
        """The `TrainingStopped` that ended the training, else None."""
        return self._callback.stopped

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        """Watch the model and the optimizer, from the global step on."""
        first = int(state.global_step)
        self._incidents = 0
        saved = _saved_state(_checkpoint(args, state), args.process_index) if first else None
        if saved is not None and saved.get("step") != first:
            saved = None
        self._callback.begin(wrapper_around(model), optimizer, start_step=first, state=saved)
        self._close_hook()
        self._logged_loss = False
        self._loss_hook = model.register_forward_hook(self._take_loss)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """End the step; a stop ends the training."""
        stop = self._callback.end_step()
        self._note_incidents(state)
        if stop is not None:
            control.should_training_stop = True
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Take the numbers of the training, and add the number of incidents.

        The Trainer's loss is `loss` where the model's output has none, and else `trainer_loss`: trl computes losses of
        its own from the logits.
        """
        if logs is None:
            return
        numbers = {name: float(value) for name, value in logs.items() if _is_of_training(name, value)}
        if self._logged_loss and "loss" in numbers:
            loss = numbers.pop("loss")
            if loss != round(loss, LOG_DIGITS):
                numbers["trainer_loss"] = loss
        self._callback.log(**numbers)
        if self._incidents:
            logs["trainsentry_incidents"] = self._incidents

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Put the detectors' state of this rank into the checkpoint."""
        folder, saved = _checkpoint(args, state), self._callback.state_dict()
        if saved is not None and folder.is_dir():
            replace_json(folder / _file_name(args.process_index), saved)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Close the monitor; what it has found in the last steps stands in the history too."""
        self._close_hook()
        self._callback.end()
        self._note_incidents(state)

    def _note_incidents(self, state: Any) -> None:
        for incident in self._callback.take_incidents():
            self._incidents += 1
            state.log_history.append({"step": state.global_step, "trainsentry_incident": incident.summary})

    def _take_loss(self, model: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not model.training or not torch.is_grad_enabled():
            return
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._logged_loss = True
            self._callback.log(loss=loss.detach())

    def _close_hook(self) -> None:
        if self._loss_hook is not None:
            self._loss_hook.remove()
            self._loss_hook = None


def _is_of_training(name: str, value: Any) -> bool:
    return isinstance(value, (int, float)) and not NOT_OF_TRAINING.match(name)


def _checkpoint(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _file_name(rank: int) -> str:
    return f"trainsentry_rank{rank}.json"


def _saved_state(folder: Path, rank: int) -> dict[str, Any] | None:
    """Return the state that `on_save` has written; None where there is none, or none that can be read."""
    try:
        return dict(read_object(folder / _file_name(rank)))
    except (InputError, OSError):
        return None
