"""Two ranks of MindSpore on this machine that are stopped together; `two_ranks.py` calls `run`."""

import json
from pathlib import Path

WISH_STEP = 4
INF_STEP = 6
STEPS = 30


def run(rank, out):
    """Write how three runs have ended on this rank."""
    ends = {
        "asked": asked_to_stop(rank, out),
        "limit": stopped_by_overflows(rank, out),
        "debugger": stopped_by_debugger(rank, out),
    }
    (Path(out) / f"ends{rank}.json").write_text(json.dumps(ends))


def train(watch, each_step):
    """Train on both ranks; return how it ended and after how many steps."""
    import mindspore as ms
    import numpy as np
    from mindspore import Tensor, nn
    from mindspore.mint import distributed

    import trainsentry

    ms.set_seed(1)
    model = nn.Dense(4, 2)
    optimizer = nn.SGD(model.trainable_params(), 0.01)
    grad = ms.value_and_grad(lambda x: (model(x) ** 2).mean(), None, optimizer.parameters)
    done = 0
    with watch(model, optimizer) as watcher:
        try:
            for step in range(STEPS):
                x = np.random.default_rng(step).standard_normal((8, 4)).astype(np.float32)
                _, gradients = grad(Tensor(each_step(watcher, step, x)))
                for gradient in gradients:
                    distributed.all_reduce(gradient)
                optimizer(tuple(gradients))
                done = step + 1
        except trainsentry.TrainingStopped as stopped:
            return type(stopped).__name__, str(stopped), stopped.step, done
    return "went on", "", STEPS, done


def asked_to_stop(rank, out):
    """Rank 1 is not watched, and asks."""
    import trainsentry

    def ask(monitor, step, x):
        if rank == 1 and step == WISH_STEP:
            monitor.request_stop("enough")
        return x

    config = {"output_dir": f"{out}/asked", "ranks": [0]}
    return train(lambda *watched: trainsentry.TrainMonitor(config).watch(*watched), ask)


def stopped_by_overflows(rank, out):
    """Gradients of rank 1 are infinite in every step from one on; the sum takes them to rank 0."""
    import trainsentry

    def spoil(monitor, step, x):
        return x * (1e38 if rank == 1 and step >= INF_STEP else 1)

    config = {"output_dir": f"{out}/limit", "overflow_check": {"overflow_nums": 2}}
    return train(lambda *watched: trainsentry.TrainMonitor(config).watch(*watched), spoil)


class Debugging:
    """Dumps every step, as a script does that calls `start`, `stop` and `step`."""

    def __init__(self, folder, model):
        import trainsentry

        Path(folder).mkdir(parents=True, exist_ok=True)
        config = {"task": "overflow_check", "dump_path": folder, "level": "mix", "overflow_check": {"overflow_nums": 1}}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        self.model = model
        self.debugger = trainsentry.PrecisionDebugger(config_path=f"{folder}/config.json")

    def __enter__(self):
        self.debugger.start(self.model)
        return self

    def next_step(self):
        self.debugger.stop()
        self.debugger.step()
        self.debugger.start(self.model)

    def __exit__(self, *error):
        self.debugger.stop()


def stopped_by_debugger(rank, out):
    """The passes of rank 1 alone overflow."""

    def spoil(debugging, step, x):
        if step:
            debugging.next_step()
        return x * (1e38 if rank == 1 and step == INF_STEP else 1)

    return train(lambda model, _: Debugging(f"{out}/debugger{rank}", model), spoil)
