"""The debugger dumps what msprobe's does, leaves training as it is, and keeps what it wrote when it is killed."""

import json
import math
import os
import signal
import subprocess
import sys
import time

import debugged
import pytest
import torch
from debugged import Awkward, Encoder, Tower, debug, make, read, train
from torch import nn

from trainsentry import PrecisionDebugger
from trainsentry.collectors.torch.saving import load_tensor


@pytest.fixture(autouse=True)
def _no_debugger_is_left():
    yield
    PrecisionDebugger.close()


LEVELS = ["L0", "L1", "mix"]


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


@pytest.mark.parametrize("level", LEVELS)
def test_names_are_msprobes_in_their_order(tmp_path, level):
    """What differs from msprobe 26.2 stands in docs/debugger.md: three groups of calls, each with its reason."""
    golden = json.loads((debugged_data() / "msprobe_names.json").read_text())
    for kind in (Awkward, Tower, Encoder):
        [dump] = debug(tmp_path / kind.__name__, kind=kind, level=level)
        ours = [n for n in dump["dump"]["data"] if n not in SEEN_BY_US_ONLY]
        inside = SEEN_INSIDE if kind is Encoder else {}
        theirs = [inside.get(n, n) for n in golden[kind.__name__][level] if n not in HANDED_ON]
        assert sorted(ours) == sorted(theirs)
        for chosen in (_is_operation, _is_forward):  # modules' backward passes end a node earlier or later
            assert [n for n in ours if chosen(n)] == [n for n in theirs if chosen(n)]


def _is_operation(name):
    return not name.startswith("Module.")


def _is_forward(name):
    return ".forward" in name


HANDED_ON = {f"Module.layer.{name}.Dropout.backward.0" for name in ("dropout", "dropout1", "dropout2")}
"""Dropouts that are off give what they take: they add nothing to the graph."""

SEEN_INSIDE = {f"Torch.relu.0.{d}": f"Functional.relu.0.{d}" for d in ("forward", "backward")}
"""torch's own layer got hold of F.relu before it was replaced; msprobe sees what that calls."""

SEEN_BY_US_ONLY = {
    "VF.gru.0.forward",
    "VF.gru.0.backward",
    "VF.lstm.0.forward",
    "VF.lstm.0.backward",
    "Torch.einsum.0.backward",
    "Tensor.__setitem__.0.backward",
    "Module.relu.ReLU.backward.0",
    "Module.bn.BatchNorm2d.backward.0",
}


def debugged_data():
    from pathlib import Path

    return Path(debugged.__file__).parents[1] / "data"


def test_forward_values_are_those_that_msprobe_wrote(tmp_path):
    golden = json.loads((debugged_data() / "msprobe_values.json").read_text())
    [dump] = debug(tmp_path, kind=Awkward, level="mix")
    for call, facts in golden.items():
        ours = dump["dump"]["data"][call]
        for group, values in facts.items():
            for one, other in zip(_leaves(ours[group]), _leaves(values), strict=True):
                assert all(_is_close(x, y) for x, y in zip(one, other, strict=True)), (call, group, one, other)


def _leaves(value):
    if isinstance(value, dict) and "dtype" in value:
        return [tuple(value[k] if not isinstance(value[k], list) else tuple(value[k]) for k in FACTS)]
    if isinstance(value, dict) and "type" in value:
        return [json.dumps(value, sort_keys=True)]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [leaf for item in items for leaf in _leaves(item)]


FACTS = ("type", "dtype", "shape", "Max", "Min", "Mean", "Norm", "requires_grad")


def _is_close(x, y):
    return math.isclose(x, y, rel_tol=1e-5, abs_tol=1e-6) if isinstance(x, float) and isinstance(y, float) else x == y


def test_gradients_of_a_call_are_those_of_autograd(tmp_path):
    model = make(Tower)
    kept = {}

    def keep(name):
        def hook(module, args, output):
            args[0].retain_grad() if args[0].requires_grad else None
            output.retain_grad()
            kept[name] = (args[0], output)

        return hook

    model.last.register_forward_hook(keep("last"))
    debugger = PrecisionDebugger(task="tensor", level="mix", dump_path=str(tmp_path))
    debugger.start(model)
    model(torch.ones(6, 4)).square().mean().backward()
    debugger.stop()
    debugger.step()
    directory = tmp_path / "step0" / "rank0" / "dump_tensor_data"

    def dumped(name):
        return load_tensor(directory / f"{name}.pt")

    given, got = kept["last"]
    assert torch.equal(dumped("Module.last.Linear.backward.0.input.0"), got.grad)
    assert torch.equal(dumped("Module.last.Linear.backward.0.output.0"), given.grad)
    linear = [p.name for p in directory.glob("Functional.linear.*.backward.output.1.pt")]
    assert len(linear) == 6
    assert torch.equal(dumped("Functional.linear.5.backward.output.1"), model.last.weight.grad)
    assert torch.equal(dumped("Module.last.Linear.parameters_grad.0.weight"), model.last.weight.grad)


def test_a_residual_branch_has_its_own_gradient_and_not_the_sum(tmp_path):
    """`x` goes into the block's norm and past it: a hook on `x` would see both together."""
    debugger = PrecisionDebugger(task="tensor", level="L0", dump_path=str(tmp_path))
    model = make(Tower, depth=1)
    whole = {}
    model.blocks[0].register_full_backward_hook(lambda m, i, o: whole.update(block=i[0].clone()))
    model.blocks[0].norm.register_full_backward_hook(lambda m, i, o: whole.update(norm=i[0].clone()))
    debugger.start(model)
    model(torch.randn(6, 4)).square().mean().backward()
    debugger.stop()
    debugger.step()
    directory = tmp_path / "step0" / "rank0" / "dump_tensor_data"
    for name, key in (("Module.blocks.0.norm.LayerNorm", "norm"), ("Module.blocks.0.Block", "block")):
        ours = load_tensor(directory / f"{name}.backward.0.output.0.pt")
        assert torch.allclose(ours, whole[key], rtol=1e-6, atol=0)
    assert not torch.allclose(whole["norm"], whole["block"])


def test_inputs_are_dumped_as_they_were_before_a_change_in_place(tmp_path):
    debugger = PrecisionDebugger(task="tensor", level="L1", dump_path=str(tmp_path))
    x = torch.ones(3)
    debugger.start()
    x.add_(1).mul_(2)
    x += 1
    debugger.stop()
    debugger.step()
    directory = tmp_path / "step0" / "rank0" / "dump_tensor_data"
    names = ("Tensor.add_.0.forward.input.0", "Tensor.mul_.0.forward.input.0", "Tensor.__iadd__.0.forward.input.0")
    assert [load_tensor(directory / f"{n}.pt")[0].item() for n in names] == [1.0, 2.0, 4.0]
    assert load_tensor(directory / "Tensor.__iadd__.0.forward.output.0.pt")[0].item() == 5.0


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


def test_sections_and_a_stop_before_the_backward_pass(tmp_path):
    model = make(Tower)
    debugger = PrecisionDebugger(task="statistics", level="mix", dump_path=str(tmp_path))
    debugger.start(model)
    first = model(torch.ones(2, 4)).sum()
    debugger.stop()
    model(torch.ones(2, 4))
    debugger.start(model)
    second = model(torch.ones(2, 4)).sum()
    debugger.stop()
    first.backward()  # nothing: the debugger is off
    debugger.start(model)
    second.backward()
    debugger.stop()
    debugger.step()
    names = list(read(tmp_path / "step0" / "rank0")["dump"]["data"])
    assert [n for n in names if n.startswith("Module.first.Linear.")] == [
        "Module.first.Linear.forward.0",
        "Module.first.Linear.forward.1",
        "Module.first.Linear.backward.1",
        "Module.first.Linear.parameters_grad.0",
    ]


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


def test_variables_that_a_script_saves_and_their_gradients(tmp_path):
    debugger = PrecisionDebugger(task="tensor", level="debug", dump_path=str(tmp_path))
    x = torch.ones(2, requires_grad=True)
    debugger.start()
    debugger.save({"a": x * 2, "b": [3, "text"]}, "mine")
    y = x * 3
    debugger.save(y, "other")
    y.sum().backward()
    debugger.stop()
    debugger.step()
    data = json.loads((tmp_path / "step0" / "rank0" / "debug.json").read_text())["data"]
    assert list(data) == ["mine.0.debug", "other.0.debug", "other_grad.0.debug"]
    assert data["mine.0.debug"]["b"] == [{"type": "int", "value": 3}, {"type": "str", "value": "text"}]
    assert data["other_grad.0.debug"]["Max"] == 1.0
    tensors = {p.name: load_tensor(p) for p in (tmp_path / "step0" / "rank0" / "dump_tensor_data").iterdir()}
    assert torch.equal(tensors["mine.0.debug.a.pt"], torch.full((2,), 2.0))


@pytest.mark.parametrize("level", LEVELS)
def test_structure_says_what_was_called_and_reads_nothing(tmp_path, level):
    [dump] = debug(tmp_path, task="structure", level=level)
    assert dump["dump"]["data"] == {}
    assert "Module.blocks.0.fc1.Linear.backward.0" in dump["construct"]


@pytest.mark.parametrize("task", ["statistics", "tensor"])
@pytest.mark.parametrize("level", LEVELS)
def test_what_is_kept_for_later_is_the_same_as_what_is_written_at_once(tmp_path, task, level):
    chosen = {"list": ["linear", "Module.last"]}
    at_once = debug(tmp_path / "a", 2, task=task, level=level, **{task: chosen})
    later = debug(tmp_path / "b", 2, task=task, level=level, async_dump=True, **{task: chosen})
    for a, b in zip(at_once, later, strict=True):
        assert a["dump"]["data"] == b["dump"]["data"]


def test_checksums_are_crc32_of_the_bytes(tmp_path):
    import zlib

    [dump] = debug(tmp_path, level="L0", statistics={"summary_mode": "md5"})
    weight = dump["dump"]["data"]["Module.first.Linear.forward.0"]["parameters"]["weight"]
    expected = zlib.crc32(make(Tower).first.weight.detach().numpy().tobytes())
    assert weight["md5"] == f"{expected:08x}"


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"list": ["Functional.linear.1.forward"]}, {"Functional.linear.1.forward"}),
        ({"list": ["gelu"], "data_mode": ["backward"]}, {"Functional.gelu.0.backward", "Functional.gelu.1.backward"}),
        (
            {"scope": ["Functional.linear.1.forward", "Functional.linear.2.forward"]},
            {"Functional.linear.1.forward", "Functional.gelu.0.forward", "Functional.linear.2.forward"},
        ),
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64, torch.int16])
def test_every_dtype_is_described_and_saved(tmp_path, dtype):
    debugger = PrecisionDebugger(task="tensor", level="L1", dump_path=str(tmp_path))
    x = torch.tensor([1.0, 2.0, 4.0])
    debugger.start()
    torch.flip(x, [0])
    x.to(dtype).data.flatten()
    torch.ops.aten.alias(x.to(dtype))
    debugger.stop()
    debugger.step()
    data = read(tmp_path / "step0" / "rank0")["dump"]["data"]
    assert list(data) == ["Torch.flip.0.forward", "Aten.alias.0.forward"]
    [facts] = data["Aten.alias.0.forward"]["output"]
    assert (facts["dtype"], facts["Max"], facts["Min"]) == (str(dtype), 4.0, 1.0)
    saved = load_tensor(tmp_path / "step0" / "rank0" / "dump_tensor_data" / facts["data_name"])
    assert saved.dtype is dtype


def test_a_long_name_gets_a_short_file_and_a_line_in_the_mapping(tmp_path):
    class Deep(nn.Module):
        def __init__(self, name):
            super().__init__()
            self.add_module(name, nn.Linear(2, 2))

        def forward(self, x):
            return next(self.children())(x)

    model = Deep("x" * 250)
    debugger = PrecisionDebugger(task="tensor", level="L0", dump_path=str(tmp_path))
    debugger.start(model)
    model(torch.ones(1, 2))
    debugger.stop()
    debugger.step()
    folder = tmp_path / "step0" / "rank0" / "dump_tensor_data"
    lines = (folder / "mapping.csv").read_text().splitlines()
    assert len(lines) == 4
    for line in lines:
        short, _, long = line.partition(",")
        assert len(long) > 255
        assert load_tensor(folder / short).numel()


KILLED = """
import os, sys, torch
sys.path.insert(0, {helpers!r})
torch.set_num_threads(1)
from debugged import make, Tower
from trainsentry import PrecisionDebugger
for out in sys.stdin:
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        print("gone", flush=True)
        continue
    debugger = PrecisionDebugger(task="statistics", level="mix", dump_path=out.strip())
    model = make(Tower)
    debugger.start(model)
    print(os.getpid(), flush=True)
    while True:
        model(torch.ones(2, 4)).sum().backward()
"""


def test_a_killed_process_leaves_whole_files_up_to_its_last_call(tmp_path):
    from pathlib import Path

    script = KILLED.format(helpers=str(Path(debugged.__file__).parent))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    parent = subprocess.Popen([sys.executable, "-c", script], start_new_session=True, **pipes)
    try:
        for i in range(8):
            out = tmp_path / str(i)
            print(out, file=parent.stdin)
            child = int(parent.stdout.readline())
            written = out / "step0" / "rank0" / "dump.json"
            while not written.exists() or written.stat().st_size < 6_000:
                time.sleep(0.01)  # a busy machine takes its time to begin
            time.sleep(0.037 * i)
            os.kill(child, signal.SIGKILL)
            assert parent.stdout.readline() == "gone\n"
            dump = read(out / "step0" / "rank0")
            data = dump["dump"]["data"]
            assert len(data) > 10
            forward = [n for n in data if ".forward" in n]
            told = {name for names, _ in dump["stack"].values() for name in names}
            assert set(forward) <= told <= set(dump["construct"])
            assert set(data) - set(dump["construct"]) == {n for n in data if ".parameters_grad." in n}
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()
