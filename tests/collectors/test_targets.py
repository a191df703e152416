"""Patterns select modules with everything below them."""

from trainsentry.collectors.targets import select

MODULES = ["", "layers", "layers.0", "layers.0.fc", "layers.1", "layers.10", "layers.10.fc"]
PARAMETERS = ["layers.0.fc.weight", "layers.0.fc.bias", "layers.10.fc.weight"]


def test_a_star_selects_everything_with_the_root():
    chosen = select(["*"], MODULES, PARAMETERS)
    assert chosen.modules == set(MODULES)
    assert chosen.parameters == set(PARAMETERS)


def test_a_module_takes_its_submodules_and_parameters_along_but_not_its_namesakes():
    chosen = select(["layers.1"], MODULES, PARAMETERS)
    assert chosen.modules == {"layers.1"}
    assert chosen.parameters == set()


def test_a_parameter_can_be_selected_alone():
    chosen = select(["*.bias"], MODULES, PARAMETERS)
    assert chosen.modules == set()
    assert chosen.parameters == {"layers.0.fc.bias"}


def test_a_pattern_that_matches_nothing_is_named():
    assert select(["layers.0", "encoder.*"], MODULES, PARAMETERS).unmatched == ("encoder.*",)
