"""A torch_npu that fails at import is the user's matter; importing and watching do not make it worse."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]

FAILS = """
import os
from pathlib import Path
import torch
with Path(os.environ["IMPORTS"]).open("a") as file:
    file.write("torch_npu\\n")
{before}
raise ImportError("libascendcl.so: cannot open shared object file")
"""

HALF_WAY = """
import types
def broken(*_):
    raise RuntimeError("the NPU runtime is not there")
torch.utils.rename_privateuse1_backend("npu")
torch._register_device_module("npu", types.SimpleNamespace(
    __name__="torch_npu.npu", is_available=broken, is_initialized=broken, device_count=broken, manual_seed_all=broken,
    is_current_stream_capturing=broken, get_rng_state_all=broken,
))
"""

CAUGHT = "try:\n    import torch_npu\nexcept ImportError:\n    pass\n"

TRAIN = """
import torch, trainsentry
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # AdamW asks torch.accelerator itself
settings = {"output_dir": "out", "strict": True, "on_incident": {"dump": {"replay": True}}}
with trainsentry.TrainMonitor(settings).watch(model, optimizer) as monitor:
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    print("steps", sorted(set(monitor.records().step)))
trainsentry.seed_all(1, True)
print("seeded")
"""


@pytest.fixture
def run(tmp_path):
    """Return a function that runs a script where torch_npu is installed as torch loads it, and is broken."""

    def run(script, before="", autoload="0"):
        site = tmp_path / "site"
        package, about = site / "torch_npu", site / "torch_npu-2.13.0.dist-info"
        for folder in (package, about):
            folder.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text(FAILS.format(before=before))
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13.0\n")
        (about / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]),
            "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload,
            "IMPORTS": str(tmp_path / "imports"),
        }
        ran = subprocess.run(
            [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        imports = tmp_path / "imports"
        return ran, len(imports.read_text().splitlines()) if imports.exists() else 0

    return run


def test_where_torch_does_not_load_it_neither_do_we(run):
    ran, imports = run(TRAIN)
    assert ran.returncode == 0, ran.stderr
    assert "steps [0, 1, 2]" in ran.stdout
    assert imports == 0


def test_where_torch_loads_it_the_error_is_torchs_and_trainsentry_still_imports(run):
    ran, imports = run("import trainsentry; print('imported')\nimport torch", autoload="1")
    assert ran.stdout == "imported\n"
    assert ran.returncode == 1
    assert "Failed to load the backend extension: torch_npu" in ran.stderr
    assert imports == 1


@pytest.mark.parametrize("before", ["", HALF_WAY])
def test_a_model_on_the_cpu_is_watched_and_everything_seeded_after_an_import_that_failed(run, before):
    ran, imports = run(CAUGHT + TRAIN, before)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "steps [0, 1, 2]\nseeded\n"
    assert imports == 1
    assert "Error" not in ran.stderr
