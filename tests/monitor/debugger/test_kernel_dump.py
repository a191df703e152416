"""Level L2 on PyTorch: acl is switched on around the kernels of one call, with its file, and off whatever happens."""

import json
import logging
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from debugged import Awkward, Tower, make, train
from recording_torch_npu import RecordingTorchNpu, installed
from torch.autograd.profiler import profile, record_function

from trainsentry import ConfigError, PrecisionDebugger
from trainsentry.collectors.torch.calls.debugging import TorchDebugging

ONCE = ["synchronize", "init_dump", "set_dump", "synchronize", "synchronize", "finalize_dump", "synchronize"]
"""The order of msprobe's kernel dump."""

WINDOW = "acl dumps"
KERNELS = ("MatMulV2.mm.3.0.1675157077172961", "Add.Add.4.0.1675157077183551")


class Acl(RecordingTorchNpu):
    """torch_npu of a machine with one NPU, whose acl writes two files into each dump."""

    def __init__(self):
        super().__init__(inf_nan=True)
        self.configurations = []
        self._window = None

    def dump_begins(self, path):
        self.configurations.append((path, json.loads(Path(path).read_text(encoding="utf-8"))))
        self._window = record_function(WINDOW)
        self._window.__enter__()

    def dump_ends(self):
        if self._window is None:
            return
        self._window.__exit__(None, None, None)
        root = Path(self.configurations[-1][1]["dump"]["dump_path"])
        folder = root / "20261124010203" / "0" / str(len(self.configurations))
        folder.mkdir(parents=True)
        for kernel in KERNELS:
            (folder / kernel).write_text("values")

    def order(self):
        """Return the functions that a dump calls, in order."""
        return [name.rpartition(".")[2] for name in self.names() if name.rpartition(".")[2] in set(ONCE)]


@pytest.fixture
def acl():
    with installed(Acl()) as module:
        yield module


def debugger_for(folder, name="Functional.linear.1.forward", acl_config=None, step=(), task="tensor", **block):
    path = folder / "config.json"
    block = {"list": [name], **block}
    whole = {"task": task, "level": "L2", "dump_path": str(folder / "dump"), "step": list(step), task: block}
    path.write_text(json.dumps(whole if acl_config is None else {**whole, "acl_config": acl_config}))
    return PrecisionDebugger(str(path), framework="torch")


def run(folder, body, **config):
    """Run `body` as one step; return the operations that ran while acl dumped."""
    debugger = debugger_for(folder, **config)
    with profile() as profiled:
        debugger.start()
        body()
        debugger.stop()
        debugger.step()
    assert debugger._session.guard.failures == {}
    debugger.close()
    events = list(profiled.function_events)
    windows = [e.time_range for e in events if e.name == WINDOW]
    inside = [e for e in events for w in windows if w.start <= e.time_range.start and e.time_range.end <= w.end]
    return [e.name for e in inside if e.name.startswith("aten::")]


def step():
    x, weight = torch.ones(3, 4, requires_grad=True), torch.ones(4, 4, requires_grad=True)
    y = F.linear(torch.relu(x), weight)
    y = F.gelu(F.linear(y, weight))
    F.layer_norm(y, (4,)).sum().backward()


def files(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_the_kernels_of_one_forward_call_are_dumped_and_no_others(tmp_path, acl, caplog):
    with caplog.at_level(logging.INFO, "trainsentry"):
        inside = run(tmp_path, step)
    assert acl.order() == ONCE
    assert inside.count("aten::linear") == 1
    assert not {"aten::gelu", "aten::relu", "aten::native_layer_norm"} & set(inside)
    [(path, content)] = acl.configurations
    folder = tmp_path / "dump" / "step0"
    assert path == str(folder / "kernel_config_0.json")
    assert content == {"dump": {"dump_list": [], "dump_mode": "all", "dump_op_switch": "on", "dump_path": str(folder)}}
    assert files(folder) == sorted(["kernel_config_0.json", *(f"20261124010203/0/1/{k}" for k in KERNELS)])
    assert "L2: step 0: Functional.linear.1.forward: 2 files in" in caplog.text


def test_the_kernels_of_the_trainings_own_backward_pass_are_dumped_and_no_others(tmp_path, acl):
    inside = run(tmp_path, step, name="Functional.linear.1.backward")
    assert acl.order() == ONCE
    assert inside.count("aten::mm") == 2
    assert not {"aten::gelu_backward", "aten::native_layer_norm_backward", "aten::linear", "aten::relu"} & set(inside)


def test_a_backward_pass_from_gradients_in_a_file_follows_its_call_at_once(tmp_path, acl):
    given = torch.randn(3, 4)
    torch.save(given, tmp_path / "Functional.linear.1.backward.input.0.pt")
    inside = run(
        tmp_path,
        step,
        name="Functional.linear.1.backward",
        backward_input=[str(tmp_path / "Functional.linear.1.backward.input.0.pt")],
    )
    assert acl.order() == ONCE
    assert inside.count("aten::mm") == 2
    assert "aten::linear" not in inside


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Awkward, "Functional.dropout.0.forward"),
        (Awkward, "Functional.dropout.0.backward"),
        (Awkward, "Functional.batch_norm.0.backward"),
        (Tower, "Functional.linear.2.backward"),
    ],
)
@pytest.mark.parametrize("from_file", [False, True])
def test_training_is_equal_to_the_bit_and_chosen_steps_are_dumped(tmp_path, acl, kind, name, from_file):
    shapes = {"dropout": (2, 5), "batch_norm": (2, 4, 6, 6), "linear": (6, 8)}
    block = {}
    if from_file and name.endswith("backward"):
        torch.save(torch.ones(shapes[name.split(".")[1]]), tmp_path / "gradient.pt")
        block = {"backward_input": str(tmp_path / "gradient.pt")}
    bare = train(make(kind), 3)
    debugger = debugger_for(tmp_path, name=name, step=[0, 2], **block)
    watched = train(make(kind), 3, debugger)
    assert debugger._session.guard.failures == {}
    debugger.close()
    assert acl.order() == ONCE * 2
    assert [path.partition("dump/")[2] for path, _ in acl.configurations] == [
        f"step{i}/kernel_config_0.json" for i in (0, 2)
    ]
    assert watched[0] == bare[0]
    assert all(torch.equal(watched[1][name], value) for name, value in bare[1].items())
    assert torch.equal(watched[2], bare[2])


def test_a_call_that_raises_switches_the_dump_off(tmp_path, acl):
    debugger = debugger_for(tmp_path, name="Torch.matmul.0.forward")
    debugger.start()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        torch.matmul(torch.ones(2, 3), torch.ones(2, 3))
    assert acl.order() == ONCE
    debugger.stop()
    debugger.step()


@pytest.mark.parametrize("refused", ["init_dump", "set_dump", "finalize_dump"])
def test_an_acl_that_refuses_never_reaches_the_training_and_is_switched_off(tmp_path, acl, caplog, refused):
    bare = train(make(Tower), 2)
    original = getattr(acl.npu, refused)

    def refuse(*args):
        original(*args)
        raise RuntimeError("acl error 507018")

    setattr(acl.npu, refused, refuse)
    debugger = debugger_for(tmp_path)
    assert train(make(Tower), 2, debugger)[0] == bare[0]
    assert "acl error 507018" in caplog.text
    expected = {"init_dump": ONCE[:2], "set_dump": [*ONCE[:3], "finalize_dump"], "finalize_dump": ONCE[:6]}
    assert acl.order() == expected[refused]
    debugger.close()


def test_the_users_acl_configuration_says_what_and_where(tmp_path, acl):
    elsewhere = tmp_path / "kernels"
    elsewhere.mkdir()
    own = {"dump": {"dump_list": [{}], "dump_path": str(elsewhere), "dump_mode": "input", "dump_op_switch": "on"}}
    (tmp_path / "acl.json").write_text(json.dumps(own))
    run(tmp_path, step, acl_config=str(tmp_path / "acl.json"), file_format="bin")
    assert acl.configurations == [(str(tmp_path / "dump" / "step0" / "kernel_config_0.json"), own)]
    assert len(files(elsewhere)) == 2


def test_kernels_by_regular_expression_statistics_one_side_and_a_scope_of_one_name(tmp_path, acl, caplog):
    with caplog.at_level(logging.INFO, "trainsentry"):
        run(
            tmp_path,
            step,
            task="statistics",
            list=["name-regex(MatMul.*)"],
            scope=["Functional.linear.0.forward"],
            data_mode=["forward", "output"],
        )
    dump = acl.configurations[0][1]["dump"]
    assert (dump["dump_mode"], dump["dump_data"]) == ("output", "stats")
    folder = tmp_path / "dump" / "step0"
    assert files(folder) == ["kernel_config_0.json", f"rank0/20261124010203/0/1/{KERNELS[0]}"]
    assert "1 files in" in caplog.text
    assert "; 1 of other kernels" in caplog.text


def test_each_rank_has_its_own_configuration(tmp_path, acl, monkeypatch):
    monkeypatch.setattr(TorchDebugging, "rank_and_world_size", staticmethod(lambda: (3, 4)))
    run(tmp_path, step)
    assert acl.configurations[0][0].endswith("step0/kernel_config_3.json")


@pytest.mark.parametrize(
    ("name", "words"),
    [("Functional.linear.7.forward", "was not called"), ("Functional.linear.0.backward", "had no backward pass")],
)
def test_a_call_that_never_came_is_said(tmp_path, acl, caplog, name, words):
    run(tmp_path, lambda: F.linear(torch.ones(2, 2), torch.ones(2, 2)), name=name)
    assert f"L2: step 0: {name} {words}" in caplog.text
    assert acl.order() == []


def test_one_backward_pass_a_step_is_dumped_and_none_of_an_earlier_step(tmp_path, acl):
    debugger = debugger_for(tmp_path, name="Functional.linear.0.backward")
    weight = torch.ones(2, 2, requires_grad=True)
    debugger.start()
    twice = F.linear(torch.ones(2, 2), weight).sum()
    twice.backward(retain_graph=True)
    twice.backward()
    debugger.stop()
    debugger.step()
    assert acl.order() == ONCE
    debugger.start()
    late = F.linear(torch.ones(2, 2), weight).sum()
    debugger.stop()
    debugger.step()
    debugger.start()
    late.backward()
    debugger.stop()
    debugger.step()
    assert acl.order() == ONCE


def test_what_a_call_changes_is_changed_once_although_it_is_made_again(tmp_path, acl):
    def bump(x, weight):
        x.data.add_(1)
        return x * weight

    torch.save(torch.ones(2), tmp_path / "g.pt")
    debugger = debugger_for(tmp_path, name="math.bump.0.backward", backward_input=str(tmp_path / "g.pt"))
    math.bump = bump
    debugger.register_custom_api(math, "bump")
    try:
        x = torch.zeros(2)
        debugger.start()
        given = math.bump(x, torch.ones(2, requires_grad=True))
        debugger.stop()
        debugger.step()
    finally:
        debugger.restore_custom_api(math, "bump")
        del math.bump
    assert (x.tolist(), given.tolist(), acl.order()) == ([1.0, 1.0], [1.0, 1.0], ONCE)


def test_gradients_that_do_not_fit_are_said(tmp_path, acl, caplog):
    torch.save(torch.ones(7), tmp_path / "g.pt")
    run(tmp_path, step, name="Functional.linear.0.backward", backward_input=str(tmp_path / "g.pt"))
    assert "is not dumped: backward_input has the shapes [[7]], its results [[3, 4]]" in caplog.text
    assert acl.order() == []


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"list": []}, r"tensor.list: \[\] at level L2; allowed: the full name of one call, such as"),
        ({"list": ["linear"]}, r"tensor.list: \['linear'\] at level L2"),
        ({"list": ["Torch.add.0.forward", "Torch.add.1.forward"]}, "allowed: the full name of one call"),
        ({"list": ["Module.fc.Linear.forward.0"]}, "allowed: the full name of one call"),
        ({"list": ["Torch.add.0.forward", "name-regex(()"]}, "is no regular expression: .*; allowed: name-regex"),
        ({"list": [], "scope": ["Torch.add.0.forward", "Torch.add.1.forward"]}, "tensor.scope: .* at level L2"),
        ({"task": "overflow_check"}, "task: 'overflow_check' at level L2; allowed: tensor, statistics"),
        ({"data_mode": ["backward"]}, r"data_mode: \[backward\] leaves out Functional.linear.1.forward; allowed: with"),
        ({"backward_input": "config.json"}, "allowed: with the name of a backward pass"),
        (
            {"list": ["Torch.add.0.backward"], "backward_input": ["gone.pt"]},
            "backward_input: 'gone.pt'; allowed: a file that exists, such as Torch.add.0.backward.input.0.pt",
        ),
        ({"acl_config": "gone.json"}, "acl_config: 'gone.json' cannot be read"),
        ({"acl_config": '{"dump_path": "."}'}, "has no object dump"),
        ({"acl_config": '{"dump": {"dump_path": "."}}'}, "dump_op_switch is 'off'; allowed: 'on'"),
        (
            {"acl_config": '{"dump": {"dump_op_switch": "on", "dump_path": "/gone"}}'},
            "dump_path is '/gone'; allowed: a folder that exists",
        ),
        (
            {"list": ["Torch.add.0.forward", "name-regex(x)"], "acl_config": '{"dump": {}}'},
            "kernels by name-regex without acl_config",
        ),
    ],
)
def test_a_mistake_is_named(tmp_path, acl, config, message):
    text = config.get("acl_config", "")
    if text.startswith("{"):
        (tmp_path / "acl.json").write_text(text)
        config = {**config, "acl_config": str(tmp_path / "acl.json")}
    with pytest.raises(ConfigError, match=message):
        debugger_for(tmp_path, **config)
    assert acl.order() == []


def test_without_an_npu_the_level_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="dumps the kernels of an NPU, and this process has none: torch_npu is not"):
        debugger_for(tmp_path)


def test_a_torch_npu_that_cannot_dump_kernels_counts_as_none(tmp_path, acl):
    del acl.npu.finalize_dump
    with pytest.raises(ConfigError, match="allowed here: L0, L1, mix, debug"):
        debugger_for(tmp_path)
