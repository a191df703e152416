"""Only the requested calls, modules, steps and sections are dumped."""

import json

import pytest
import torch
from debugged import LEVELS, Awkward, Tower, debug, make, read, train

from trainsentry import PrecisionDebugger


def calls_of(folder, stem):
    return [n for n in read(folder / "step0" / "rank0")["dump"]["data"] if n.startswith(stem)]


@pytest.mark.parametrize("level", LEVELS)
def test_a_section_that_is_stopped_before_its_backward_pass_has_it_until_the_step(tmp_path, level):
    model = make(Tower)
    debugger = PrecisionDebugger(task="statistics", level=level, dump_path=str(tmp_path))
    debugger.start(model)
    first = model(torch.ones(2, 4)).sum()
    debugger.stop()
    between = model(torch.ones(2, 4)).sum()
    debugger.start(model)
    second = model(torch.ones(2, 4)).sum()
    debugger.stop()
    second.backward(retain_graph=True)
    between.backward()  # not seen, so its backward pass is not either
    first.backward(retain_graph=True)
    debugger.step()
    first.backward()  # after its step
    debugger.start(model)
    first = model(torch.ones(2, 4)).sum()
    debugger.stop()
    debugger.step()
    linears = 6  # of one forward pass
    if level != "L1":
        assert calls_of(tmp_path, "Module.first.Linear.") == [
            "Module.first.Linear.forward.0",
            "Module.first.Linear.forward.1",
            "Module.first.Linear.backward.1",
            "Module.first.Linear.parameters_grad.0",
            "Module.first.Linear.backward.0",
            "Module.first.Linear.parameters_grad.1",
        ]
    if level != "L0":
        assert [n for n in calls_of(tmp_path, "Functional.linear.") if "backward" in n] == [
            *(f"Functional.linear.{n}.backward" for n in reversed(range(linears, 2 * linears))),
            *(f"Functional.linear.{n}.backward" for n in reversed(range(linears))),
        ]
    later = read(tmp_path / "step1" / "rank0")["dump"]["data"]
    assert later
    assert not any("backward" in name or "grad" in name for name in later)


@pytest.mark.parametrize("task", ["tensor", "structure", "overflow_check"])
def test_every_task_has_the_backward_pass_after_stop(tmp_path, task):
    model = make(Tower)
    path = tmp_path / "config.json"
    settings = {"task": task, "level": "mix", "overflow_check": {"overflow_nums": -1}}
    path.write_text(json.dumps({"dump_path": str(tmp_path), **settings}))
    debugger = PrecisionDebugger(str(path))
    debugger.start(model)
    loss = model(torch.ones(2, 4)).sum()
    debugger.stop()
    (loss * torch.inf).backward()
    debugger.step()
    dump = read(tmp_path / "step0" / "rank0")
    assert "Module.last.Linear.backward.0" in dump["construct"]
    assert ("Module.last.Linear.backward.0" in dump["dump"]["data"]) == (task != "structure")


def test_a_range_of_tokens_of_an_inference(tmp_path):
    model = make(Tower).eval()
    debugger = PrecisionDebugger(task="statistics", level="mix", dump_path=str(tmp_path))
    debugger.start(model, token_range=[1, 2])
    with torch.no_grad():
        for _ in range(4):
            model(torch.ones(1, 4))
    debugger.stop()
    debugger.step()
    names = list(read(tmp_path / "step0" / "rank0")["dump"]["data"])
    assert [n for n in names if n.startswith("Module.first.")] == [
        "Module.first.Linear.forward.0",
        "Module.first.Linear.forward.1",
    ]
    assert not any("backward" in n for n in names)


def test_the_window_of_one_module(tmp_path):
    model = make(Tower)
    debugger = PrecisionDebugger(task="statistics", level="mix", dump_path=str(tmp_path))
    debugger.module_dump(model.blocks[1], "second")
    model(torch.ones(2, 4)).sum().backward()
    debugger.module_dump_end()
    debugger.step()
    names = {n for n in read(tmp_path / "step0" / "rank0")["dump"]["data"] if n.startswith("Module.")}
    assert "Module.second.Block.forward.0" in names
    assert "Module.second.fc1.Linear.backward.0" in names
    assert not any("first" in n for n in names)


@pytest.mark.parametrize("level", LEVELS)
def test_the_window_of_one_module_gives_the_dump_back(tmp_path, level):
    model = make(Tower)
    debugger = PrecisionDebugger(task="statistics", level=level, dump_path=str(tmp_path))
    debugger.start(model)
    x = model.first(torch.ones(2, 4))
    debugger.module_dump(model.blocks[1], "second")
    x = model.blocks[1](x)
    model.blocks[0](x)
    debugger.module_dump_end()
    model.last(x).sum().backward()
    debugger.stop()
    debugger.step()
    names = calls_of(tmp_path, "")
    modules = {n for n in names if n.startswith("Module.") and "_grad" not in n}
    assert "Module.second.fc1.Linear.forward.0" in modules
    assert "Module.second.fc1.Linear.backward.0" in modules
    assert not any(n.startswith("Module.blocks") for n in modules)
    assert ("Module.last.Linear.backward.0" in modules) == (level != "L1")
    linears = [n for n in names if n.startswith("Functional.linear") and "forward" in n]
    assert len(linears) == {"L0": 0, "L1": 2, "mix": 4}[level]  # outside the window two, inside it two


@pytest.mark.parametrize("level", LEVELS)
def test_structure_says_what_was_called_and_reads_nothing(tmp_path, level):
    [dump] = debug(tmp_path, task="structure", level=level)
    assert dump["dump"]["data"] == {}
    assert "Module.blocks.0.fc1.Linear.backward.0" in dump["construct"]


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"list": ["Functional.linear.1.forward"]}, {"Functional.linear.1.forward"}),
        ({"list": ["gelu"], "data_mode": ["backward"]}, {"Functional.gelu.0.backward", "Functional.gelu.1.backward"}),
        (
            {"scope": ["Functional.linear.1.forward", "Functional.linear.2.forward"]},
            {"Functional.linear.1.forward", "Functional.gelu.0.forward", "Functional.linear.2.forward"},
        ),
        ({"scope": ["Functional.gelu.1.forward"]}, {"Functional.gelu.1.forward"}),
    ],
)
def test_names_and_ranges_choose_calls(tmp_path, config, wanted):
    [dump] = debug(tmp_path, level="L1", statistics=config)
    assert set(dump["dump"]["data"]) == wanted


def test_a_range_of_one_backward_pass_holds_its_parameters_gradients_and_ends_there(tmp_path):
    name = "Module.blocks.1.fc2.Linear.backward.0"
    [dump] = debug(tmp_path, level="L0", statistics={"scope": [name, name]})
    assert set(dump["dump"]["data"]) == {name, "Module.blocks.1.fc2.Linear.parameters_grad.0"}


def test_nothing_is_hung_on_the_graph_of_calls_that_are_not_recorded(tmp_path):
    debugger = PrecisionDebugger(task="statistics", level="L1", dump_path=str(tmp_path))
    watcher = PrecisionDebugger._session.watcher
    watcher.selection.parts = ("Functional.gelu",)
    x = torch.ones(2, requires_grad=True)
    debugger.start()
    hooked = torch.nn.functional.gelu(x)
    plain = x * 2
    debugger.stop()
    begun = []
    watcher.backward_begins = lambda call, _: begun.append(call.name("backward"))
    (hooked.sum() + plain.sum()).backward()
    assert set(begun) == {"Functional.gelu.0.backward"}
    debugger.step()


def test_at_level_mix_a_module_takes_all_that_is_in_it(tmp_path):
    [dump] = debug(tmp_path, level="mix", statistics={"list": ["Module.blocks.1.Block.forward.0"]})
    names = set(dump["dump"]["data"])
    assert {"Module.blocks.1.fc1.Linear.forward.0", "Functional.gelu.1.forward", "Tensor.__add__.1.forward"} <= names
    assert not any("blocks.0" in n or "backward" in n for n in names)


def test_at_level_mix_a_part_of_a_name_takes_the_modules_that_have_it_and_all_in_them(tmp_path):
    [dump] = debug(tmp_path, level="mix", kind=Awkward, statistics={"list": ["relu"]})
    names = set(dump["dump"]["data"])
    assert {"Module.relu.ReLU.forward.0", "Functional.relu.0.forward", "Torch.relu.0.forward"} <= names
    assert all("relu" in name for name in names)


def test_without_a_list_every_call_is_recorded(tmp_path):
    debugger = PrecisionDebugger(task="statistics", level="L1", dump_path=str(tmp_path))
    debugger.start()
    torch.ones(2, 3).flatten().view(3, 2).transpose(0, 1).contiguous().add(1)
    debugger.stop()
    debugger.step()
    assert calls_of(tmp_path, "") == [f"Tensor.{n}.0.forward" for n in ("flatten", "view", "transpose", "add")]


@pytest.mark.parametrize("mode", ["input", "output"])
def test_only_inputs_or_only_outputs(tmp_path, mode):
    [dump] = debug(tmp_path, level="L1", statistics={"data_mode": [mode]})
    content = dump["dump"]["data"]["Functional.linear.0.forward"]
    assert ("output" in content) == (mode == "output")
    assert ("input_args" in content) == (mode == "input")


def test_only_the_steps_that_are_asked_for(tmp_path):
    debug_dir = tmp_path / "d"
    debugger = PrecisionDebugger(task="statistics", level="L0", dump_path=str(debug_dir), step=[1, "3-4"])
    train(make(Tower), 6, debugger)
    assert sorted(p.name for p in debug_dir.iterdir()) == ["step1", "step3", "step4"]
    assert PrecisionDebugger._session.is_over


def test_steps_are_counted_from_where_a_run_goes_on(tmp_path):
    debugger = PrecisionDebugger(task="statistics", level="L0", dump_path=str(tmp_path))
    debugger.set_init_step(40)
    train(make(Tower), 2, debugger)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step40", "step41"]
