"""The debugger leaves training as it is, knows the tree of calls, and keeps what it wrote when it is killed."""

import mmap
import time
from pathlib import Path

import debugged
import pytest
import torch
from debugged import LEVELS, Awkward, Tower, debug, make, read, train
from forked_scripts import Script, start_forked

from trainsentry import PrecisionDebugger
from trainsentry.exporters.dumps.dump_reader import read_possibly_torn


@pytest.mark.parametrize("task", ["statistics", "tensor", "structure", "overflow_check"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", [Awkward, Tower])
def test_training_is_equal_to_the_bit_and_nothing_is_left_behind(tmp_path, task, level, kind):
    bare = train(make(kind), 3)
    model = make(kind)
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    torch.manual_seed(0)
    debugger = PrecisionDebugger(task=task, level=level, dump_path=str(tmp_path))
    model = make(kind)
    with_it = train(model, 3, debugger)
    assert debugger._session.guard.failures == {}
    debugger.close()
    assert with_it[0] == bare[0]
    assert all(torch.equal(with_it[1][name], value) for name, value in bare[1].items())
    assert torch.equal(with_it[2], bare[2])
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == hooks
    assert torch.overrides._len_torch_function_stack() == 0
    assert not any(p._backward_hooks for p in model.parameters())


def test_the_tree_has_parents_forward_and_backward(tmp_path):
    [dump] = debug(tmp_path, level="mix")
    parents = dump["construct"]
    assert parents["Functional.linear.1.forward"] == "Module.blocks.0.fc1.Linear.forward.0"
    assert parents["Functional.linear.1.backward"] == "Module.blocks.0.fc1.Linear.backward.0"
    assert parents["Module.blocks.0.fc1.Linear.backward.0"] == "Module.blocks.0.Block.backward.0"
    assert parents["Functional.gelu.0.backward"] == "Module.blocks.0.Block.backward.0"
    assert parents["Module.blocks.0.Block.forward.0"] is None
    assert parents["optimizer"] is None
    assert "optimizer" in parents.values()


def test_stacks_are_stored_once_and_lead_to_the_users_line(tmp_path):
    [dump] = debug(tmp_path, level="mix")
    stacks = [tuple(lines) for _, lines in dump["stack"].values()]
    assert len(stacks) == len(set(stacks))
    by_name = {name: lines for names, lines in dump["stack"].values() for name in names}
    assert "debugged.py" in by_name["Functional.gelu.0.forward"][0]
    assert {n for n in dump["dump"]["data"] if ".forward" in n} == set(by_name)


def test_a_list_of_models_and_a_model_that_is_changed(tmp_path):
    a, b = make(Tower), make(Tower)
    debugger = PrecisionDebugger(task="statistics", level="L0", dump_path=str(tmp_path))
    debugger.start([a, b])
    (a(torch.ones(2, 4)) + b(torch.ones(2, 4))).sum().backward()
    debugger.stop()
    debugger.step()
    names = set(read(tmp_path / "step0" / "rank0")["dump"]["data"])
    assert {"Module.0.first.Linear.forward.0", "Module.1.first.Linear.backward.0"} <= names
    debugger.start(b)
    b(torch.ones(2, 4))
    debugger.stop()
    debugger.step()
    assert "Module.first.Linear.forward.0" in read(tmp_path / "step1" / "rank0")["dump"]["data"]


def test_a_function_of_the_users_is_seen_as_one_call(tmp_path):
    import math as package

    package.scaled_sum = lambda x, factor=1.0: (x * factor).sum()
    debugger = PrecisionDebugger(task="tensor", level="L1", dump_path=str(tmp_path))
    debugger.register_custom_api(package, "scaled_sum")
    x = torch.ones(3, requires_grad=True)
    try:
        debugger.start()
        package.scaled_sum(x, factor=2.0).backward()
        debugger.stop()
        debugger.step()
    finally:
        debugger.restore_custom_api(package, "scaled_sum")
    dump = read(tmp_path / "step0" / "rank0")["dump"]["data"]
    assert list(dump) == ["math.scaled_sum.0.forward", "math.scaled_sum.0.backward"]
    assert dump["math.scaled_sum.0.backward"]["output"][0]["Max"] == 2.0
    assert package.scaled_sum.__name__ == "<lambda>"
    with pytest.raises(AttributeError, match="has no function 'nothing'"):
        debugger.register_custom_api(package, "nothing")


def test_there_is_one_debugger_in_a_process(tmp_path):
    first = PrecisionDebugger(task="statistics", dump_path=str(tmp_path))
    assert PrecisionDebugger(task="tensor", dump_path=str(tmp_path / "other")) is first
    assert PrecisionDebugger._session.config.task == "statistics"
    first.close()
    with pytest.raises(RuntimeError, match="no debugger"):
        PrecisionDebugger.start()


def test_a_checkpointed_forward_is_marked_as_done_again(tmp_path):
    from torch.utils.checkpoint import checkpoint

    model = make(Tower)
    debugger = PrecisionDebugger(task="statistics", level="L0", dump_path=str(tmp_path))
    debugger.start(model)
    checkpoint(model, torch.ones(2, 4), use_reentrant=False).sum().backward()
    debugger.stop()
    debugger.step()
    data = read(tmp_path / "step0" / "rank0")["dump"]["data"]
    assert "is_recompute" not in data["Module.first.Linear.forward.0"]
    assert data["Module.first.Linear.forward.1"]["is_recompute"] is True


def test_calls_inside_torch_compile_are_left_alone(tmp_path):
    model = make(Tower)
    compiled = torch.compile(model, backend="eager")
    expected = make(Tower)(torch.ones(2, 4))
    debugger = PrecisionDebugger(task="statistics", level="L1", dump_path=str(tmp_path))
    debugger.start(model)
    found = compiled(torch.ones(2, 4))
    debugger.stop()
    debugger.step()
    assert torch.equal(found, expected)


def test_what_cannot_be_dumped_stands_in_the_steps_error_log(tmp_path, monkeypatch):
    from trainsentry.collectors.torch.calls.tensor_facts import TensorFacts

    def broken(*_):
        raise ValueError("no such layout")

    bare = train(make(Tower), 2)
    debugger = PrecisionDebugger(task="statistics", level="L1", dump_path=str(tmp_path))
    model = make(Tower)
    monkeypatch.setattr(TensorFacts, "describe", broken)
    assert train(model, 2, debugger)[0] == bare[0]
    text = (tmp_path / "step0" / "rank0" / "dump_error_info.log").read_text()
    assert "debugger: Traceback" in text
    assert "ValueError: no such layout" in text


KILLED = """
import sys, torch
torch.set_num_threads(1)
from debugged import Tower, make
from trainsentry import PrecisionDebugger
debugger = PrecisionDebugger(task="statistics", level="mix", dump_path=sys.argv[1])
model = make(Tower)
debugger.start(model)
while True:
    model(torch.ones(2, 4)).sum().backward()
"""


def is_cut_at_a_page(path):
    """Return whether the kernel has ended the last write at a page's end, as it may where the kill comes just then."""
    return path.stat().st_size % mmap.PAGESIZE == 0 and not path.read_text().rstrip().endswith("}\n}")


def test_a_killed_process_leaves_whole_files_up_to_its_last_call(tmp_path):
    cut = 0
    for i in range(5):
        out = tmp_path / str(i)
        process = start_forked(Script(KILLED, [out]), path=[Path(debugged.__file__).parent])
        written = out / "step0" / "rank0" / "dump.json"
        try:
            while not written.exists() or written.stat().st_size < 9_000:
                assert process.is_running()
                time.sleep(0.01)  # a busy machine takes its time to begin
            time.sleep(0.037 * i)
        finally:
            process.kill()
            process.wait()
        if is_cut_at_a_page(written):
            cut += 1
            calls, is_torn = read_possibly_torn(written)
            assert is_torn
            assert len(calls["data"]) > 10, "our own reader takes the calls before the cut"
            continue
        dump = read(out / "step0" / "rank0")
        data = dump["dump"]["data"]
        assert len(data) > 10
        forward = [n for n in data if ".forward" in n]
        told = {name for names, _ in dump["stack"].values() for name in names}
        assert set(forward) <= told <= set(dump["construct"])
        assert set(data) - set(dump["construct"]) == {n for n in data if ".parameters_grad." in n}
    assert cut <= 1
