"""A run on the device stops at the overflow that was configured, and not at those that a scaler skips."""

import functools
import json

import pytest
import torch
from device_training import EVERYTHING, adamw, config_of, loss_of, new_model, train
from the_device import DEVICE

import trainsentry


@pytest.mark.parametrize("fused", [False, True])
def test_overflows_that_the_scaler_skips_are_counted_apart_and_stop_nothing(out, fused):
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**40)
    config = config_of(out, collect=EVERYTHING, overflow_check={"overflow_nums": 1})
    way = {"autocast": torch.float16, "optimizer": functools.partial(adamw, fused=fused)}
    assert train(config, scaler=scaler, **way).stopped is None
    status = json.loads((out / "rank0" / "status.json").read_text())
    assert status["overflow_steps"] == 0
    assert status["skipped_overflow_steps"] == status["skipped_steps"] > 0


@pytest.mark.parametrize("same_step", [False, True])
def test_the_limit_of_overflows_ends_the_run(out, same_step):
    def before_step(model, step):
        if step >= 10:
            model.norm.weight.detach()[3] = float("inf")

    dump = {"dump": {"same_step": same_step}}
    config = config_of(out, overflow_check={"overflow_nums": 3}, on_incident=dump)
    ran = train(config, before_step=before_step, settled=True)
    assert isinstance(ran.stopped, trainsentry.OverflowLimitReached)
    assert ran.stopped.step == 12 if same_step else 12 <= ran.stopped.step <= 14


def test_a_stop_on_request_ends_the_run(out):
    model = new_model()
    optimizer = adamw(model)
    with trainsentry.TrainMonitor(config_of(out)).watch(model, optimizer) as monitor:
        loss_of(model, 0).backward()
        optimizer.step()
        monitor.request_stop("enough")
        loss_of(model, 1).backward()
        with pytest.raises(trainsentry.TrainingStopped, match="enough"):
            optimizer.step()
