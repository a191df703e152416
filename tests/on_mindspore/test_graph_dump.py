"""Level L0 of compiled graphs.

TensorDump has no kernel on the CPU: taps are run in PyNative mode, and in a graph with Print in its place; with
TensorDump a graph is compiled up to the choice of kernels.
"""

import json
import re
import subprocess
import sys

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from trainsentry import ConfigError, PrecisionDebugger
from trainsentry.collectors.mindspore.calls import debugging, graph_taps

MODEL = """
import sys
import mindspore as ms, numpy as np
from mindspore import Tensor, nn, ops
from trainsentry.collectors.mindspore.calls.graph_taps import tap, untap

class Two(nn.Cell):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Dense(4, 3), nn.Dense(4, 3)

    def construct(self, x, y, scale=2.0):
        return self.left(x) * scale, self.right(y)

class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.two, self.act = Two(), nn.ReLU()

    def construct(self, x):
        a, b = self.two(x, x + 1, scale=3.0)
        return self.act(a + b) + self.act(0 - a)
"""

exec(MODEL)  # the very model of the scripts


def steps(debugger, model, steps, x):
    grad = ms.value_and_grad(lambda x: model(x).sum(), None, model.trainable_params())
    found = []
    for _ in range(steps):
        debugger.start(model)
        loss, gradients = grad(x)
        debugger.stop()
        debugger.step()
        found += [float(loss.asnumpy()), *(float(g.asnumpy().sum()) for g in gradients)]
    return found


@pytest.fixture
def as_if_compiled(monkeypatch):
    monkeypatch.setattr(debugging, "in_graph_mode", lambda: True)
    monkeypatch.setattr(debugging, "on_host", lambda: False)
    yield
    PrecisionDebugger.close()


def make(seed=1):
    ms.set_seed(seed)
    return Net()  # noqa: F821


X = Tensor(np.arange(8, dtype=np.float32).reshape(2, 4) - 3)


@pytest.mark.parametrize("task", ["tensor", "statistics"])
def test_a_step_s_files_become_its_dump(tmp_path, as_if_compiled, task):
    model = make()
    debugger = PrecisionDebugger(dump_path=str(tmp_path), task=task, level="L0", step=[1, 2], framework="mindspore")
    steps(debugger, model, 4, X)
    assert sorted(p.name for p in (tmp_path / "graph").glob("step*")) == ["step1", "step2"]
    assert not list((tmp_path / "graph" / "arriving").rglob("*.npy"))
    folder = tmp_path / "graph" / "step2" / "rank0"
    data = json.loads((folder / "dump.json").read_text())["data"]
    forward = [name for name in data if ".forward." in name]
    assert sorted(forward) == [
        "Cell.act.ReLU.forward.0",
        "Cell.act.ReLU.forward.1",
        "Cell.two.Two.forward.0",
        "Cell.two.left.Dense.forward.0",
        "Cell.two.right.Dense.forward.0",
    ]
    a, b = (t.asnumpy() for t in model.two(X, X + 1, scale=3.0))
    two = data["Cell.two.Two.forward.0"]
    assert [round(t["Max"], 4) for t in two["output"]] == [round(float(t.max()), 4) for t in (a, b)]
    assert [t["Max"] for t in two["input_args"]] == [4.0, 5.0]
    first, second = (data[f"Cell.act.ReLU.forward.{i}"]["input_args"][0]["Norm"] for i in range(2))
    assert np.allclose([first, second], [np.linalg.norm(a + b), np.linalg.norm(a)], rtol=1e-5)
    # Of two calls the second one's gradient comes first.
    for i, x in enumerate((a + b, -a)):
        backward = data[f"Cell.act.ReLU.backward.{i}"]
        assert np.isclose(backward["output"][0]["Norm"], np.sqrt((x > 0).sum()), rtol=1e-5)
        assert backward["input"][0]["Norm"] == pytest.approx(np.sqrt(x.size))
    tree = json.loads((folder / "construct.json").read_text())
    assert tree["Cell.two.left.Dense.forward.0"] == "Cell.two.Two.forward.0"
    assert tree["Cell.act.ReLU.forward.1"] is None
    if task == "tensor":
        saved = np.load(folder / "dump_tensor_data" / two["output"][1]["data_name"])
        assert np.array_equal(saved, b)
    else:
        assert not (folder / "dump_tensor_data").exists()


def test_training_is_the_same_and_cells_are_given_back(tmp_path, as_if_compiled):
    model = make()
    bare = steps(PrecisionDebugger(dump_path=str(tmp_path / "none"), level="debug", framework="mindspore"), model, 2, X)
    PrecisionDebugger.close()
    debugger = PrecisionDebugger(dump_path=str(tmp_path), task="statistics", level="L0", framework="mindspore")
    assert steps(debugger, model, 2, X) == bare
    assert "construct" in vars(model.two)
    PrecisionDebugger.close()
    assert not any("construct" in vars(cell) for _, cell in model.cells_and_names())


def test_only_chosen_cells_are_tapped_and_overflows_are_told_apart(tmp_path, as_if_compiled):
    model = make()
    given = {"overflow_check": {"overflow_nums": -1, "list": ["two"]}, "task": "overflow_check", "level": "L0"}
    (tmp_path / "config.json").write_text(json.dumps({**given, "dump_path": str(tmp_path), "rank": [], "step": []}))
    debugger = PrecisionDebugger(config_path=str(tmp_path / "config.json"), framework="mindspore")
    steps(debugger, model, 1, Tensor(np.full((2, 4), 3e38, np.float32)))
    data = json.loads((tmp_path / "graph" / "step0" / "rank0" / "dump.json").read_text())["data"]
    assert data["Cell.two.Two.forward.0"]["overflow"] == "made"
    assert not any("ReLU" in name for name in data)


def run(tmp_path, body):
    """Run a script in a process of its own: graphs are compiled from a file's source."""
    script = tmp_path / "script.py"
    script.write_text(MODEL + body)
    command = [sys.executable, script, tmp_path]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, check=False
    )
    return done.returncode, done.stdout


def test_a_tapped_graph_computes_the_same_and_dumps_in_its_own_order(tmp_path):
    code, said = run(
        tmp_path,
        """
ms.set_context(mode=ms.GRAPH_MODE)
net, x = Net(), Tensor(np.arange(8, dtype=np.float32).reshape(2, 4) - 3)
bare = net(x).asnumpy()
tapped = Net()
for a, b in zip(tapped.trainable_params(), net.trainable_params()):
    a.set_data(Tensor(b.asnumpy()))
tap(tapped.two, "TWO", ops.Print)
tap(tapped.act, "ACT", ops.Print)
grad = ms.value_and_grad(tapped, None, tapped.trainable_params())
out, gradients = grad(x)
_, wanted = ms.value_and_grad(net, None, net.trainable_params())(x)
assert np.array_equal(out.asnumpy(), bare)
assert all(np.array_equal(a.asnumpy(), b.asnumpy()) for a, b in zip(gradients, wanted))
a, b = (t.asnumpy() for t in net.two(x, x + 1, scale=3.0))
print("SIGNS", ((a + b) > 0).astype(int).tolist(), (-a > 0).astype(int).tolist())
""",
    )
    assert code == 0, said[-3000:]
    names = [line for line in said.splitlines() if line.startswith(("TWO.", "ACT."))]
    two = [f"TWO.forward.@.{place}" for place in ("input.0", "input.1", "output.0", "output.1")]
    act = ["ACT.forward.@.input.0", "ACT.forward.@.output.0"] * 2
    assert [name for name in names if ".forward." in name] == [*two, *act]
    assert sorted(name for name in names if ".backward." in name) == [
        *["ACT.backward.@.input.0"] * 2,
        *["ACT.backward.@.output.0"] * 2,
        "TWO.backward.@.input.0",
        "TWO.backward.@.input.1",
    ]
    signs = re.search(r"SIGNS (.*\]\]) (.*)", said)
    gradients = re.findall(r"ACT\.backward\.@\.output\.0\nTensor\(.*?value=\n(.*?)\)\n", said, re.DOTALL)
    found = [np.array(re.findall(r"[-+.e\d]+", text), float).reshape(2, 3).tolist() for text in gradients]
    assert found == [json.loads(signs[2]), json.loads(signs[1])], "the later call's gradient comes first"


def test_with_tensordump_a_graph_is_compiled_up_to_its_kernel(tmp_path):
    code, said = run(
        tmp_path,
        """
ms.set_context(mode=ms.GRAPH_MODE)
net = Net()
tap(net.two, sys.argv[1] + "/two")
ms.value_and_grad(net, None, net.trainable_params())(Tensor(np.ones((2, 4), np.float32)))
""",
    )
    assert code != 0
    assert "Unsupported op [TensorDump] on CPU" in said


def test_on_the_cpu_a_compiled_graph_is_refused_at_once(tmp_path):
    ms.set_context(mode=ms.GRAPH_MODE)
    with pytest.raises(ConfigError, match="level: 'L0' in GRAPH_MODE on the CPU, which has no kernel of TensorDump"):
        PrecisionDebugger(dump_path=str(tmp_path), level="L0", task="tensor", framework="mindspore").start(make())
    assert graph_taps.MOST == 16
