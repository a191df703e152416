"""`trainsentry run` watches a script that does not know of it, and the script runs as if it were alone."""

import json
import signal
import subprocess
import sys

import pandas as pd
import pytest
from forked_scripts import Script, run_forked

COMMAND = "from trainsentry.monitor.cli.app import main; main()"
BY_ITSELF = "import runpy, sys; sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"
RUN = [sys.executable, "-c", COMMAND, "run"]

TRAIN = """
import os, sys, torch

class Trainer:
    def __init__(self):
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)

    def fit(self, steps):
        for step in range(steps):
            loss = self.net(torch.randn(2, 4)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return loss.item()

if __name__ == "__main__":
    loss = Trainer().fit(int(sys.argv[1]))
    print(sys.argv[1:], os.path.basename(sys.argv[0]), repr(loss))
    sys.exit(7)
"""

GAN = """
import torch
generator, critic = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
ema = torch.nn.Linear(2, 2)
ema.load_state_dict(generator.state_dict())
g, c = torch.optim.SGD(generator.parameters(), lr=0.1), torch.optim.SGD(critic.parameters(), lr=0.1)
for _ in range(4):
    for optimizer in (c, g):
        optimizer.zero_grad()
        critic(generator(torch.ones(1, 2))).sum().backward()
        optimizer.step()
"""

ALONE = """
import trainsentry
exec(open("train.py").read().split("if __name__")[0])
trainer = Trainer()
trainsentry.TrainMonitor({"output_dir": "own"}).watch(trainer.net, trainer.optimizer)
trainer.fit(3)
"""

ENDS = """
import os, signal, sys
exec(open("train.py").read().split("if __name__")[0])
trainer = Trainer()
trainer.fit(3)
WAY
"""


def filled(folder):
    """Write the scripts into a folder."""
    folder.mkdir(exist_ok=True)
    for name, text in {"train.py": TRAIN, "gan.py": GAN, "alone.py": ALONE}.items():
        (folder / name).write_text(text)
    (folder / "every_step.json").write_text(json.dumps({"collect": {"activations": {"every": 1}}}))
    return folder


@pytest.fixture
def folder(tmp_path):
    return filled(tmp_path)


PROGRAMS = {
    "dry": ["--dry", "gan.py"],
    "several models": ["gan.py"],
    "watches itself": ["alone.py"],
    "raises": ["-m", "ends", "3"],
    "is killed": ["ends.py"],
}
WAYS = {
    "raises": "raise ValueError('mine', sys.argv[1:], __name__)",
    "is killed": "os.kill(os.getpid(), signal.SIGTERM)",
}


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The folder of each program that was run, and how it ended; torch was there before them, unlike in other tests."""
    root = tmp_path_factory.mktemp("programs")
    scripts = {name: Script(COMMAND, ["run", *args], filled(root / name)) for name, args in PROGRAMS.items()}
    for name, way in WAYS.items():
        (root / name / "ends.py").write_text(ENDS.replace("WAY", way))
    ended = run_forked(scripts)
    return {name: (root / name, ended[name]) for name in PROGRAMS}


def run(folder, *args, before=RUN):
    command = [*before, *map(str, args)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def names(folder, table):
    return set(pd.read_csv(folder / "monitor_output" / "rank0" / f"{table}_0-999.csv")["name"])


def test_the_script_gives_the_same_numbers_arguments_and_status(folder):
    program = ["train.py", 5, "--lr", "3"]
    scripts = {
        "alone": Script(BY_ITSELF, program, folder),
        "watched": Script(COMMAND, ["run", "--config", "every_step.json", *program], folder),
    }
    alone, watched = run_forked(scripts).values()
    assert (watched.stdout, watched.returncode) == (alone.stdout, 7)
    assert names(folder, "gradient") == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert "0.output.0" in names(folder, "activation_output")
    assert "not recorded" not in watched.stderr, watched.stderr
    assert "5 steps watched, 0 incidents" in watched.stderr


def test_dry_says_what_would_be_watched_and_watches_nothing(programs):
    folder, done = programs["dry"]
    assert done.returncode == 0, done.stderr
    assert "model generator: Linear, 6 parameters" in done.stdout
    assert "model critic: Linear, 3 parameters" in done.stdout
    assert "ema" not in done.stdout
    assert done.stdout.count("optimizer SGD") == 2
    assert not (folder / "monitor_output").exists()


def test_several_models_are_named_by_their_variables_and_a_copy_is_left_out(programs):
    folder, done = programs["several models"]
    assert done.returncode == 0, done.stderr
    assert names(folder, "gradient") == {f"{m}.{p}" for m in ("generator", "critic") for p in ("weight", "bias")}
    assert "4 steps watched" in done.stderr


def test_a_script_that_watches_itself_is_left_alone(programs):
    folder, done = programs["watches itself"]
    assert done.returncode == 0, done.stderr
    assert (folder / "own" / "run.json").exists()
    assert not (folder / "monitor_output").exists()


@pytest.mark.parametrize(
    ("name", "status", "state"), [("raises", 1, "closed"), ("is killed", -signal.SIGTERM, "trainer gone")]
)
def test_exceptions_and_signals_are_the_programs_own(programs, name, status, state):
    """A module runs as with `python -m`."""
    folder, done = programs[name]
    assert done.returncode == status
    assert ("ValueError: ('mine', ['3'], '__main__')" in done.stderr) == (status == 1)
    assert wait_for_state(folder / "monitor_output" / "rank0" / "status.json") == state


def wait_for_state(path):
    """Return the state that the recorder leaves, which ends after the trainer."""
    import time

    for _ in range(200):
        state = json.loads(path.read_text())["state"]
        if state != "running":
            return state
        time.sleep(0.05)
    return "running"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nothing.py"], "nothing.py: no such script"),
        (["--config", "wrong.json", "train.py", "3"], "colect: unknown key"),
    ],
)
def test_a_mistake_is_said_before_the_script_runs(folder, args, message):
    (folder / "wrong.json").write_text('{"colect": {}}')
    done = run(folder, *args)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stdout == ""


def test_two_ranks_under_torchrun_are_one_run(folder):
    script = TRAIN.replace(
        "self.optimizer =",
        "torch.distributed.init_process_group('gloo')\n"
        "        self.net = torch.nn.parallel.DistributedDataParallel(self.net)\n        self.optimizer =",
    ).replace("sys.exit(7)", "torch.distributed.destroy_process_group()")
    (folder / "ddp.py").write_text(script)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    done = run(folder, "ddp.py", "4", before=[*launcher, *RUN])
    assert done.returncode == 0, done.stderr[-3000:]
    run_file = json.loads((folder / "monitor_output" / "run.json").read_text())
    assert run_file["world_size"] == 2
    assert {p.name for p in (folder / "monitor_output").glob("rank*")} == {"rank0", "rank1"}
    assert names(folder, "gradient") == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_what_a_launcher_puts_before_the_command_reaches_the_script(folder):
    """DeepSpeed's launcher gives each process its number before every other argument."""
    (folder / "args.py").write_text("import sys\nprint(sys.argv[1:])")
    done = run(folder, "--local_rank=1", "run", "args.py", "--lr", "3", before=RUN[:-1])
    assert done.stdout == "['--local_rank=1', '--lr', '3']\n", done.stderr


TRAINERS = {
    "transformers": """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=64, n_positions=8))
tokens = [{"input_ids": torch.arange(8) + i, "labels": torch.arange(8) + i} for i in range(32)]
Trainer(model, TrainingArguments("out", max_steps=4, report_to=[], use_cpu=True), train_dataset=tokens).train()
""",
    "accelerate": """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters()), loader)
for x, y in loader:
    accelerator.backward((model(x) - y).square().mean())
    optimizer.step()
    optimizer.zero_grad()
""",
    "lightning": """
import lightning
class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net
    def training_step(self, batch, index):
        return (self.net(batch[0]) - batch[1]).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
lightning.Trainer(max_steps=4, accelerator="cpu", logger=False, enable_checkpointing=False).fit(Regression(), loader)
""",
}


@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainers_script_is_watched_as_it_is(folder, name):
    pytest.importorskip(name)
    head = """
import torch
net = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
loader = torch.utils.data.DataLoader([(x, x.sum(0, keepdim=True)) for x in torch.randn(32, 8)], batch_size=8)
"""
    (folder / "trainer.py").write_text(head + TRAINERS[name])
    [done] = run_forked({name: Script(COMMAND, ["run", "trainer.py"], folder)}).values()
    assert done.returncode == 0, done.stderr[-3000:]
    assert "4 steps watched, 0 incidents" in done.stderr, done.stderr[-3000:]
    assert len(names(folder, "gradient")) >= 4
