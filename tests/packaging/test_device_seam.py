"""What differs between devices stands in one folder: no other file names a device's module, type or backend."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SEAM = "collectors/torch/device/"
CODE = ("collectors", "anomaly", "exporters", "monitor")

MODULES = frozenset({"cuda", "npu", "xpu", "mps", "mtia", "accelerator", "Event", "Stream", "get_device_module"})
"""Attributes of torch that belong to devices."""

ATTRIBUTES = frozenset({"is_cuda", "is_npu", "is_xpu", "is_mps", "cudnn", "pin_memory"})
"""Attributes of anything else. `is_cpu` is allowed: it asks for host memory, in a path where a call costs too much."""

TYPES = frozenset({"cuda", "npu", "xpu", "mps", "torch_npu", "nccl", "hccl", "gloo"})
"""Texts that are the name of a device's type, module or backend."""

ALLOWED = {
    "collectors/torch/calls/call_names.py": {"npu"},  # `torch.ops.npu` is a namespace of operators, which dumps name
    "monitor/cli/demo/command.py": {"cuda", "npu"},  # `--device cuda` is a word of the command line
    "monitor/debugger/free_benchmark_config.py": {"cuda", "npu"},  # values of `fuzz_device`
    "monitor/doctor/machine.py": {"torch_npu"},  # a package with a version
}


def asked(text):
    """Return what a file's code asks about devices: the names and texts that only the seam may use."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute):
            of_torch = isinstance(node.value, ast.Name) and node.value.id == "torch"
            if node.attr in ATTRIBUTES or (of_torch and node.attr in MODULES):
                found.add(f"{'torch.' if of_torch else ''}{node.attr}")
        elif isinstance(node, ast.keyword) and node.arg == "pin_memory":
            found.add("pin_memory")
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found |= {name for name in names if name.split(".")[0] == "torch_npu" or name.startswith("torch.cuda")}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in TYPES:
            found.add(node.value)
        elif isinstance(node, ast.Compare) and "device" in ast.unparse(node.left) and "type" in ast.unparse(node.left):
            found.add(ast.unparse(node))
    return found


def files():
    return [path for folder in CODE for path in sorted((ROOT / folder).rglob("*.py"))]


def test_only_the_seam_names_devices():
    strangers = {}
    for path in files():
        name = path.relative_to(ROOT).as_posix()
        if name.startswith(SEAM) or "mindspore" in name:
            continue
        found = asked(path.read_text()) - ALLOWED.get(name, set())
        if found:
            strangers[name] = found
    assert strangers == {}


@pytest.mark.parametrize(
    "line",
    [
        "torch.cuda.synchronize()",
        "x = torch.npu",
        "torch.accelerator.is_available()",
        "if device.type == 'cpu': pass",
        "kind in {'cuda', 'npu'}",
        "import torch_npu",
        "from torch.cuda import Stream",
        "getattr(torch, 'npu', None)",
        "init_process_group('nccl')",
        "x.is_cuda",
        "torch.empty(1, pin_memory=True)",
        "x.pin_memory()",
        "def f():\n    return torch.Event(device)",
    ],
)
def test_each_way_of_asking_is_found(line):
    assert asked(line)


@pytest.mark.parametrize("line", ["device_of(x).on_host", "x.is_cpu", "names = 'cpu cuda npu'", "x.device", "'cpu'"])
def test_what_asks_for_no_device_is_not(line):
    assert asked(line) == set()
