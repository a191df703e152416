"""Two ranks of MindSpore on this machine that train with collectives; run with a role and an output directory."""

import inspect
import os
import socket
import subprocess
import sys

FAULT_STEP = 22
STEPS = 26


def run_ranks(out):
    """Run the scheduler and two ranks; raise an error with their output if one fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    base = {**os.environ, "MS_WORKER_NUM": "2", "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": port, "GLOG_v": "3"}
    roles = [{"MS_ROLE": "MS_SCHED"}, *({"MS_ROLE": "MS_WORKER", "MS_NODE_ID": str(rank)} for rank in range(2))]
    command = [sys.executable, __file__, str(out)]
    ranks = [
        subprocess.Popen(command, env={**base, **role}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for role in roles
    ]
    said = [rank.communicate(timeout=150)[0] for rank in ranks]
    ends = {
        role["MS_ROLE"] + role.get("MS_NODE_ID", ""): (rank.returncode, text[-3000:])
        for role, rank, text in zip(roles, ranks, said, strict=True)
    }
    assert all(code == 0 for code, _ in ends.values()), ends


def main(out):
    import mindspore as ms
    import stopping_ranks

    ms.communication.init()
    if os.environ["MS_ROLE"] == "MS_SCHED":
        return
    rank = ms.communication.get_rank()
    lose_payloads(rank, out)
    stopping_ranks.run(rank, out)


def lose_payloads(rank, out):
    """Train with a sum that comes back to rank 1 as its own summand in one step."""
    import mindspore as ms
    import numpy as np
    from mindspore import Tensor, nn
    from mindspore.mint import distributed

    original = distributed.all_reduce

    def losing(tensor, *args, **kwargs):
        lost = rank == 1 and losing.step == FAULT_STEP
        return original(tensor.copy() if lost else tensor, *args, **kwargs)

    losing.__signature__ = inspect.signature(original)
    distributed.all_reduce = losing

    import trainsentry

    ms.set_seed(1)
    model = nn.Dense(4, 2)
    optimizer = nn.SGD(model.trainable_params(), 0.1)
    grad = ms.value_and_grad(lambda x: (model(x) ** 2).mean(), None, optimizer.parameters)
    config = {"output_dir": out, "collect": {"communication": {"every": 1}}}
    data = np.random.default_rng(rank)
    with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
        for step in range(STEPS):
            losing.step = step
            loss, gradients = grad(Tensor(data.standard_normal((8, 4)).astype(np.float32)))
            for gradient in gradients:
                distributed.all_reduce(gradient)
            everyones = [Tensor(np.zeros(1, np.float32)) for _ in range(2)]
            distributed.all_gather(everyones, loss.reshape(1))
            monitor.log(loss=loss)
            optimizer(tuple(gradient / 2 for gradient in gradients))
    assert distributed.all_reduce is losing, "everything is as it was"
    distributed.all_reduce = original


if __name__ == "__main__":
    main(*sys.argv[1:])
