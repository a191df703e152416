"""At level L2, MindSpore accepts our configuration and dumps the kernels of a compiled model."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from trainsentry import ConfigError, PrecisionDebugger

SCRIPT = """
import sys
import mindspore as ms, numpy as np
from mindspore import Tensor, nn
from trainsentry import PrecisionDebugger

debugger = PrecisionDebugger(dump_path=sys.argv[1], task="tensor", level="L2", step=["1-2"], framework="mindspore")
ms.set_context(mode=ms.GRAPH_MODE)
net = nn.SequentialCell(nn.Dense(4, 3), nn.ReLU())
for step in range(4):
    debugger.start(net)
    y = net(Tensor(np.full((2, 4), float(step), np.float32)))
    debugger.stop()
    debugger.step()
np.save(sys.argv[1] + "/expected.npy", net(Tensor(np.full((2, 4), 2.0, np.float32))).asnumpy())
"""


def test_a_compiled_model_s_kernels_are_dumped_at_the_steps_asked_for(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "MINDSPORE_DUMP_CONFIG"}
    script = tmp_path / "script.py"  # graphs are compiled from a file's source
    script.write_text(SCRIPT)
    out = tmp_path / "dump"
    subprocess.run([sys.executable, script, out], check=True, env=environment, timeout=120)
    written = json.loads((out / "mindspore_dump_config.json").read_text())["common_dump_settings"]
    assert (written["iteration"], written["saved_data"], written["path"]) == ("1-2", "tensor", str(out))
    kernels = list((out / "rank_0" / "Net").rglob("ReLU.*.output.0.*.npy"))
    assert sorted(path.parent.name for path in kernels) == ["1", "2"]
    [last] = [path for path in kernels if path.parent.name == "2"]
    assert np.array_equal(np.load(last), np.load(out / "expected.npy"))
    assert not list(out.glob("step*")), "there is nothing of ours to dump"


@pytest.mark.parametrize(
    ("arguments", "variable", "message"),
    [
        ({"task": "statistics"}, None, "task: 'statistics' at level L2 on the CPU; allowed: tensor"),
        ({"task": "grad_probe"}, None, "task: 'grad_probe'"),
        (
            {"config_path": "acl_config"},
            None,
            "acl_config: 'acl.json' at level L2 with MindSpore; allowed: with PyTorch",
        ),
        (
            {"config_path": "backward_input"},
            None,
            r"backward_input: \['g.pt'\] at level L2 with MindSpore; allowed: with",
        ),
        ({"task": "tensor"}, "/elsewhere.json", "MINDSPORE_DUMP_CONFIG: is set to '/elsewhere.json' already"),
    ],
)
def test_what_mindspore_would_refuse_is_refused_at_once(tmp_path, monkeypatch, arguments, variable, message):
    monkeypatch.delenv("MINDSPORE_DUMP_CONFIG", raising=False)
    if variable is not None:
        monkeypatch.setenv("MINDSPORE_DUMP_CONFIG", variable)
    if "config_path" in arguments:
        inside = {"acl_config": {"acl_config": "acl.json"}, "backward_input": {"tensor": {"backward_input": "g.pt"}}}
        path = tmp_path / "config.json"
        path.write_text(json.dumps({"task": "tensor", **inside[arguments["config_path"]]}))
        arguments = {"config_path": str(path)}
    with pytest.raises(ConfigError, match=message):
        PrecisionDebugger(dump_path=str(tmp_path), level="L2", framework="mindspore", **arguments)
    assert os.environ.get("MINDSPORE_DUMP_CONFIG") == variable


def test_kernels_and_sides_are_said_in_mindspores_words(tmp_path, monkeypatch):
    from trainsentry.collectors.mindspore.calls.kernel_dump import configuration
    from trainsentry.monitor.debugger.debugger_config import load_debugger_config

    given = {"dump_path": str(tmp_path), "level": "L2", "task": "overflow_check", "rank": [3]}
    given["overflow_check"] = {"list": ["Default/fc/MatMul-op0"], "data_mode": ["output"]}
    settings = configuration(load_debugger_config(None, given)[0])["common_dump_settings"]
    assert (settings["op_debug_mode"], settings["dump_mode"], settings["input_output"]) == (3, 1, 2)
    assert (settings["kernels"], settings["support_device"]) == (["Default/fc/MatMul-op0"], [3])
