"""The first suspect is the weight, the module or the batch that broke."""

import pytest
import torch
from device_training import EVERYTHING, config_of, flip_bit, train

AT = 17
"""A step at which the default configuration reads no weights."""

READ_AT = 20
"""A step at which it reads them."""


# Without `same_step` the update of a step at which no weight is read spreads a fault before anyone has looked.
@pytest.mark.parametrize(("same_step", "at"), [(True, AT), (False, READ_AT)])
@pytest.mark.parametrize(
    "name", ["blocks.1.down.weight", "blocks.0.attention.qkv.weight", "head.weight", "norm.weight"]
)
def test_a_flipped_bit_is_traced_to_its_weight(out, name, same_step, at):
    element = 5 if name == "norm.weight" else 100
    config = config_of(out, on_incident={"stop": True, "dump": {"same_step": same_step}})
    ran = train(config, before_step=flip_bit(name, at, element=element), settled=True)
    incident = ran.incidents[0]
    assert (incident.name, incident.quantity) == (name, "parameter")
    assert ran.stopped is not None
    assert at <= ran.stopped.step <= at + 3
    assert (out / "dump").exists()


def test_a_nan_that_a_module_makes_is_traced_to_the_module_and_its_step(out):
    def nan_output(_module, _args, output):
        return output.masked_fill(torch.arange(output.shape[-1], device=output.device) == 3, float("nan"))

    def before_step(model, step):
        if step == AT:
            model.blocks[1].up.register_forward_hook(nan_output, prepend=True)

    ran = train(config_of(out, collect=EVERYTHING, on_incident={"stop": True}), before_step=before_step, settled=True)
    incident = ran.incidents[0]
    assert (incident.name, incident.quantity, incident.first_seen) == ("blocks.1.up.output.0", "activation_output", AT)
    assert ran.stopped is not None


def test_a_healthy_training_raises_no_alarm(out):
    assert train(config_of(out, collect=EVERYTHING), steps=60).incidents == ()
