"""A compiled model trains the same to the bit, and its activations are read."""

import shutil

import pytest
import torch
from device_training import EVERYTHING, assert_same, config_of, train
from the_device import ON_CPU

needs_a_compiler = pytest.mark.skipif(ON_CPU and shutil.which("c++") is None, reason="inductor needs a C++ compiler")
MODES = ["default"] if ON_CPU else ["default", "reduce-overhead"]


def compiling(**options):
    """Return a compiler of whole models that begins afresh."""

    def compiler(model):
        torch._dynamo.reset()
        return torch.compile(model, **options)

    return compiler


def counts_of(ran):
    """Return the number of names of each quantity in the last step."""
    return ran.records.groupby("quantity")["name"].nunique()


def test_a_backend_that_fuses_nothing_trains_the_same_and_every_module_is_read(out):
    compiler = compiling(backend="aot_eager")
    watched = train(config_of(out, collect=EVERYTHING), steps=8, compiler=compiler)
    assert_same(train(steps=8, compiler=compiler), watched)
    assert watched.incidents == ()
    assert counts_of(watched)["activation_output"] >= 10


@needs_a_compiler
@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_fused_graphs_train_the_same_and_their_ends_are_read(out, mode):
    watched = train(config_of(out, collect=EVERYTHING), steps=8, compiler=compiling(mode=mode))
    assert_same(train(steps=8, compiler=compiling(mode=mode)), watched)
    assert watched.incidents == ()
    counts = counts_of(watched)
    assert counts["gradient"] == len(watched.weights)
    assert counts["activation_output"] >= 1


@needs_a_compiler
@pytest.mark.slow
def test_fused_graphs_are_read_inside_where_that_is_asked_for(out):
    collect = {**EVERYTHING, "activations": {"every": 1, "inside_graphs": True}}
    watched = train(config_of(out, collect=collect), steps=8, compiler=compiling())
    assert watched.losses == pytest.approx(train(steps=8).losses, rel=1e-3)
    assert counts_of(watched)["activation_output"] >= 10
