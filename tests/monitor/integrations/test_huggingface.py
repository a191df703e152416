"""Hugging Face's own Trainer is watched by one callback."""

import json
import os
import signal

import pandas as pd
import pytest
import torch

import trainsentry

transformers = pytest.importorskip("transformers")

STEPS = 6


class Tokens(torch.utils.data.Dataset):
    samples = 64

    def __len__(self):
        return self.samples

    def __getitem__(self, i):
        tokens = torch.randint(0, 64, (8,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": tokens, "labels": tokens}


class Break(transformers.TrainerCallback):
    """Puts a NaN into a weight before a step."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, model=None, **_):
        if state.global_step == self.step:
            model.transformer.h[0].mlp.c_fc.weight.data[0, 0] = torch.nan


def trainer(folder, *callbacks, **settings):
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=64, n_positions=8)
    arguments = {
        "max_steps": STEPS, "per_device_train_batch_size": 4, "logging_steps": 1, "report_to": [], "use_cpu": True,
        "save_strategy": "no", "disable_tqdm": True, "output_dir": str(folder), **settings,
    }  # fmt: skip
    return transformers.Trainer(
        transformers.GPT2LMHeadModel(config),
        transformers.TrainingArguments(**arguments),
        train_dataset=Tokens(),
        callbacks=list(callbacks),
    )


def callback(out, **config):
    from trainsentry.integrations import HFCallback

    return HFCallback({"output_dir": str(out), "strict": True, **config})


def scalars(out):
    return pd.read_csv(out / "rank0" / "scalars_0-999.csv")


@pytest.mark.parametrize("accumulation", [1, 2])
def test_steps_losses_and_gradients_are_recorded_and_training_is_the_same_to_the_bit(out, tmp_path, accumulation):
    settings = {"gradient_accumulation_steps": accumulation}
    bare = trainer(tmp_path / "bare", **settings)
    bare.train()
    watched = trainer(tmp_path / "watched", callback(out), **settings)
    watched.train()
    for ours, theirs in zip(watched.model.parameters(), bare.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    gradients = pd.read_csv(out / "rank0" / "gradient_0-999.csv")
    assert sorted(gradients.step.unique()) == list(range(STEPS))
    assert len(gradients) == STEPS * len(list(watched.model.parameters()))
    numbers = scalars(out)
    loss = numbers[numbers.name == "loss"]
    assert list(loss.groupby("step").size()) == [accumulation] * STEPS, "of every micro-batch"
    logged = [line["loss"] for line in watched.state.log_history if "loss" in line]
    of_step = loss.groupby("step").value.agg("mean" if accumulation == 1 else "sum")
    assert list(of_step) == pytest.approx(logged, abs=1e-3)
    assert (numbers.name == "grad_norm").any()


class Preferring(transformers.Trainer):
    """Makes a loss of its own from the logits, and adds numbers to the log, as trl does."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = outputs.logits.square().mean()
        return (loss, outputs) if return_outputs else loss

    def log(self, logs, *args, **kwargs):
        super().log(logs | {"rewards/margins": 0.5 + self.state.global_step, "num_tokens": 7.0}, *args, **kwargs)


def test_the_loss_that_a_trainer_computes_itself_and_the_numbers_of_its_log_are_recorded(out, tmp_path, monkeypatch):
    monkeypatch.setattr(transformers, "Trainer", Preferring)
    training = trainer(tmp_path / "trainer", callback(out))
    training.train()
    numbers = scalars(out)
    logged = [line["loss"] for line in training.state.log_history if "loss" in line]
    own = numbers[numbers.name == "trainer_loss"]
    assert dict(zip(own.step, own.value, strict=True)) == pytest.approx(dict(enumerate(logged[:-1], 1)))
    assert list(numbers[numbers.name == "rewards/margins"].value) == [1.5 + step for step in range(STEPS - 1)]
    assert {"loss", "grad_norm"} <= set(numbers.name)
    assert not {"num_tokens", "epoch", "train_runtime"} & set(numbers.name)


def test_watch_before_train_with_no_optimizer_yet_records_every_step(out, tmp_path):
    training = trainer(tmp_path / "trainer")
    assert training.optimizer is None
    with trainsentry.TrainMonitor({"output_dir": str(out)}).watch(training.model, training.optimizer):
        training.train()
    assert sorted(pd.read_csv(out / "rank0" / "gradient_0-999.csv").step.unique()) == list(range(STEPS))


def test_a_stop_ends_the_training_as_the_trainer_likes_it_and_says_why(out, tmp_path):
    watching = callback(out, on_incident={"stop": True})
    training = trainer(tmp_path / "trainer", watching, Break(3))
    training.train()  # returns
    assert training.state.global_step == 4, "the step of the incident is the last"
    assert "transformer.h.0.mlp.c_fc.weight" in watching.stopped.reason
    assert watching.monitor is None
    assert json.loads((out / "rank0" / "status.json").read_text())["state"] == "closed"
    (line,) = [line for line in training.state.log_history if "trainsentry_incident" in line]
    assert (line["step"], line["trainsentry_incident"]) == (4, watching.stopped.incident.summary)
    assert [incident.id for incident in watching.incidents] == [watching.stopped.incident.id], "after the training too"


class Late(transformers.TrainerCallback):
    """Holds the recorder from a step on until the training ends."""

    def __init__(self, step, watching):
        self.step, self.watching = step, watching

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == self.step:
            self.recorder = self.watching.monitor._loop.link.running.process.pid
            os.kill(self.recorder, signal.SIGSTOP)

    def on_train_end(self, args, state, control, **_):
        os.kill(self.recorder, signal.SIGCONT)


def test_what_is_found_as_the_training_ends_stands_in_its_history_too(out, tmp_path):
    watching = callback(out, export={"max_wait": 0.1})
    training = trainer(tmp_path / "trainer", Late(3, watching), watching, Break(3))
    training.train()
    told = [line for line in training.state.log_history if "trainsentry_incident" in line]
    assert "transformer.h.0.mlp.c_fc.weight" in told[-1]["trainsentry_incident"]
    assert told[0]["step"] == STEPS


def test_a_resumed_training_goes_on_with_its_steps_and_learned_state(out, tmp_path, monkeypatch):
    saving = {"save_strategy": "steps", "save_steps": 3}
    trainer(tmp_path / "trainer", callback(out), max_steps=3, **saving).train()
    saved = json.loads((tmp_path / "trainer" / "checkpoint-3" / "trainsentry_rank0.json").read_text())
    assert saved["step"] == 3
    assert json.loads(saved["detection"])["learned"]["series"]
    loaded = []
    load = trainsentry.TrainMonitor.load_state_dict
    monkeypatch.setattr(
        trainsentry.TrainMonitor, "load_state_dict", lambda self, state: (loaded.append(state), load(self, state))
    )
    trainer(tmp_path / "trainer", callback(out), **saving).train(resume_from_checkpoint=True)
    assert loaded == [saved]
    steps = sorted(s for path in (out / "rank0").glob("gradient_*.csv") for s in pd.read_csv(path).step.unique())
    assert steps == list(range(STEPS))


def test_data_that_begin_anew_after_a_resume_are_told_and_data_that_go_on_are_not(out, tmp_path, monkeypatch):
    monkeypatch.setattr(Tokens, "samples", 4 * 100)
    saving = {"save_strategy": "steps", "save_steps": 60}
    trainer(tmp_path / "trainer", callback(out), max_steps=60, **saving).train()
    summaries = {}
    for skip in (False, True):  # `ignore_data_skip` is how its users make that mistake
        again = out.with_name(f"again_{skip}")
        resumed = trainer(tmp_path / "trainer", callback(again), max_steps=66, ignore_data_skip=skip)
        resumed.train(resume_from_checkpoint=str(tmp_path / "trainer" / "checkpoint-60"))
        lines = (again / "incidents.jsonl").read_text().splitlines() if (again / "incidents.jsonl").exists() else []
        summaries[skip] = [json.loads(line)["summary"] for line in lines]
    assert summaries[False] == []
    assert "the data loader began anew after the resume: input.input_ids" in summaries[True][0]
    assert "of step 60 is the batch of step 0 again" in summaries[True][0]


def test_report_to_goes_on_beside_it(out, tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    seen = []

    class Reporter(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **_):
            seen.append(dict(logs))

    training = trainer(tmp_path / "trainer", callback(out), Reporter())
    training.train()
    assert sum("loss" in logs for logs in seen) == STEPS
