"""With the default configuration and with everything, training on the device is the same to the bit."""

import functools

import pytest
import torch
from device_training import EVERYTHING, adamw, assert_same, config_of, flip_bit, train
from the_device import DEVICE

CONFIGURATIONS = {"default": {}, "everything": {"collect": EVERYTHING, "export": {"csv": True, "tensorboard": True}}}

WAYS = {
    "plain": {},
    "foreach": {"optimizer": functools.partial(adamw, foreach=True)},
    "bf16 and a fused optimizer": {"autocast": torch.bfloat16, "optimizer": functools.partial(adamw, fused=True)},
}


def test_the_bare_training_repeats_itself_or_nothing_here_could_be_compared():
    for way in WAYS.values():
        assert_same(train(**way), train(**way))


@pytest.mark.parametrize("config", CONFIGURATIONS)
@pytest.mark.parametrize("way", WAYS)
def test_training_is_the_same_to_the_bit(out, way, config):
    watched = train(config_of(out, **CONFIGURATIONS[config]), **WAYS[way])
    assert_same(train(**WAYS[way]), watched)
    assert watched.incidents == ()
    assert len(watched.records) > 0


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_that_skips_steps_skips_the_same_ones(out, fused):
    def scaled(config=None):
        scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**40, growth_interval=5)
        way = {"autocast": torch.float16, "optimizer": functools.partial(adamw, fused=fused)}
        return train(config, scaler=scaler, **way), scaler.get_scale()

    bare, scale = scaled()
    watched, same_scale = scaled(config_of(out, collect=EVERYTHING))
    assert scale == same_scale < 2.0**40
    assert_same(bare, watched)
    assert watched.incidents == ()


@pytest.mark.parametrize("same_step", [False, True])
def test_a_fault_and_everything_it_sets_off_changes_nothing(out, same_step):
    fault = flip_bit("blocks.1.down.weight", at=17)
    config = config_of(out, on_incident={"dump": {"same_step": same_step, "replay": True}})
    watched = train(config, before_step=fault, settled=True)
    assert_same(train(before_step=fault), watched)
    assert watched.incidents != ()
    assert (out / "dump").exists()
