"""One rank of DDP and of FSDP2, over the device's own backend, trains the same to the bit and is read."""

import socket

import pytest
import torch
import torch.distributed as dist
from device_training import EVERYTHING, assert_same, config_of, flip_bit, train
from the_device import DEVICE, MODULE
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


@pytest.fixture(scope="module", autouse=True)
def _group():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    if DEVICE.type != "cpu":
        MODULE.set_device(DEVICE.index or 0)
    dist.init_process_group(init_method=address, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(model):
    mesh = dist.device_mesh.init_device_mesh(DEVICE.type, (1,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


WRAPPERS = {"ddp": DistributedDataParallel, "fsdp2": sharded}


@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_rank_trains_the_same_to_the_bit(out, kind):
    collect = {**EVERYTHING, "gradients": {"every": 1, "before_reduction": True}}
    watched = train(config_of(out, collect=collect), wrap=WRAPPERS[kind])
    assert_same(train(wrap=WRAPPERS[kind]), watched)
    assert watched.incidents == ()
    names = watched.records.groupby("quantity")["name"].nunique()
    assert names["gradient"] == names["parameter"] == len(watched.weights)
    assert names["activation_output"] >= 10


def test_under_ddp_a_flipped_bit_is_traced_to_its_weight(out):
    fault = flip_bit("blocks.1.down.weight", at=17)
    ran = train(
        config_of(out, on_incident={"stop": True, "dump": {"same_step": True}}),
        wrap=WRAPPERS["ddp"],
        before_step=fault,
        settled=True,
    )
    assert ran.incidents[0].name == "blocks.1.down.weight"
    assert ran.stopped is not None
    assert torch.isfinite(torch.tensor(ran.losses[:17])).all()
