"""Tensors and gradients in a dump are those of the call itself, whatever their dtype and the length of their name."""

import json
import threading
import time
import zlib

import pytest
import torch
from debugged import LEVELS, Tower, debug, make, read
from torch import nn

from trainsentry import PrecisionDebugger
from trainsentry.collectors.torch.calls import tensor_files
from trainsentry.collectors.torch.saving import load_tensor


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


@pytest.mark.parametrize("task", ["statistics", "tensor"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("parts", [["linear", "Module.last"], []], ids=["of some", "of all"])
def test_what_is_kept_for_later_is_the_same_as_what_is_written_at_once(tmp_path, task, level, parts):
    chosen = {"list": parts}
    at_once = debug(tmp_path / "a", 2, task=task, level=level, **{task: chosen})
    later = debug(tmp_path / "b", 2, task=task, level=level, async_dump=True, **{task: chosen})
    for a, b in zip(at_once, later, strict=True):
        assert a["dump"]["data"] == b["dump"]["data"]


def test_copies_that_wait_to_be_written_are_bounded(tmp_path, monkeypatch):
    """A slow disk holds the training up rather than fill the host's memory."""
    slow, written = threading.Semaphore(0), []

    def write(source, path):
        slow.acquire()
        written.append(path.name)

    monkeypatch.setattr(tensor_files, "_written", write)
    files, size = tensor_files.TensorFiles(most_bytes=4000), 1000
    trainer = threading.Thread(target=lambda: [files.write(torch.ones(250), tmp_path / str(i)) for i in range(40)])
    trainer.start()
    while files.most_waiting <= size and trainer.is_alive():  # a busy machine may not run it at once
        time.sleep(0.001)
    for _ in range(40):
        assert files.most_waiting <= 4 * size
        slow.release()
    trainer.join(30)
    files.drain()
    assert written == [str(i) for i in range(40)]
    assert size < files.most_waiting <= 4 * size


def test_checksums_are_crc32_of_the_bytes(tmp_path):
    [dump] = debug(tmp_path, level="L0", statistics={"summary_mode": "md5"})
    weight = dump["dump"]["data"]["Module.first.Linear.forward.0"]["parameters"]["weight"]
    expected = zlib.crc32(make(Tower).first.weight.detach().numpy().tobytes())
    assert weight["md5"] == f"{expected:08x}"


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
    names = ["Torch.flip.0", "Tensor.to.0", "Tensor.flatten.0", "Tensor.to.1", "Aten.alias.0"]
    assert list(data) == [f"{name}.forward" for name in names]
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


def test_arguments_of_a_method_that_torch_writes_in_python_are_those_of_the_caller(tmp_path):
    debugger = PrecisionDebugger(task="tensor", level="L1", dump_path=str(tmp_path))
    x = torch.arange(6.0)
    debugger.start()
    x.split([2, 4])
    x.split(split_size=3)
    torch.Tensor.split(x, 2)
    torch.split(x, 3, dim=0)
    debugger.stop()
    debugger.step()
    data = read(tmp_path / "step0" / "rank0")["dump"]["data"]
    entries = [data[f"{name}.forward"] for name in ("Tensor.split.0", "Tensor.split.1", "Tensor.split.2")]
    assert [e["input_args"][1:] for e in entries[:2]] == [[[{"type": "int", "value": n} for n in (2, 4)]], []]
    assert entries[1]["input_kwargs"] == {"split_size": {"type": "int", "value": 3}}
    assert entries[2]["input_args"][1] == {"type": "int", "value": 2}
    by_function = data["Torch.split.0.forward"]
    assert (by_function["input_args"][1]["value"], by_function["input_kwargs"]["dim"]["value"]) == (3, 0)


def test_a_gradient_that_a_hook_has_changed_since_is_not_the_calls(tmp_path):
    """The gradient at a leaf is handed out, and its hooks run, before the gradient at the other input is there."""
    debugger = PrecisionDebugger(task="tensor", level="L1", dump_path=str(tmp_path))
    first, second = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
    first.register_hook(lambda gradient: gradient.mul_(5))
    debugger.start()
    nn.functional.linear(first, second).sum().backward()
    debugger.stop()
    debugger.step()
    gradients = read(tmp_path / "step0" / "rank0")["dump"]["data"]["Functional.linear.0.backward"]["output"]
    assert [g is None for g in gradients] == [True, False]
