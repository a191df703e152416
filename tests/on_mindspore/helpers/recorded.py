"""A dump of MindSpore's operations to check."""

import json

import mindspore as ms
from cells import batches, net
from mindspore import mint, ops

from trainsentry import PrecisionDebugger


def forward(model, x, y):
    """Call operations of every kind that a dump names: mint, ops, methods, operators, primitives."""
    h = model(x)
    h = mint.nn.functional.relu(h) * 2 + h.abs() - 1
    h = h + ops.softmax(h, -1) + mint.matmul(h, h.T) @ h + ops.gelu(h) + mint.exp(h) * 0.1
    first, _ = ops.split(h, 1, 1)
    h = mint.concat([h, h], 0).reshape((2, -1)).astype(ms.float16).astype(ms.float32)
    return (h * h).mean() + first.sum() + ops.max(y, 1)[0].sum()


def dumped(folder, task="statistics"):
    """Record one step; return the folder of its dump."""
    folder.mkdir(exist_ok=True)
    config = folder / "config.json"
    config.write_text(json.dumps({"task": task, "dump_path": str(folder / "dump"), "level": "L1"}))
    debugger = PrecisionDebugger(str(config), framework="mindspore")
    model = net(layers=1)
    x, y = next(batches(1))
    debugger.start(model)
    ms.value_and_grad(lambda x: forward(model, x, y), 0, model.trainable_params())(x)
    debugger.stop()
    debugger.step()
    debugger.close()
    return folder / "dump" / "step0" / "rank0"
