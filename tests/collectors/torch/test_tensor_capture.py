"""A dump holds the parameters of modules, also of those that give them names as if they were other modules'."""

import torch
from torch import nn

from trainsentry.collectors.guard import Guard
from trainsentry.collectors.torch.sharding.model_names import ModelNames
from trainsentry.collectors.torch.tensor_capture import TensorCapture


class Renaming(nn.Module):
    """Keeps a parameter under a name of modules that it has not, as torchrl's parameters of other networks."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def named_parameters(self, *args, **kwargs):
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield name.replace("layer.", "layer.kept.0."), parameter


def test_parameters_that_no_module_holds_by_their_names_are_those_of_the_next_one_above():
    names = ModelNames()
    model = Renaming()
    names.add([model])
    assert {p.module for p in names.parameters} == {"layer.kept.0"}
    capture = TensorCapture(names, Guard())
    optimizer = torch.optim.AdamW(model.parameters())
    [weight, bias] = capture.model_tensors({"layer.kept.0"}, [optimizer])
    assert weight.entry == bias.entry == "Module.layer.Linear.forward.0"
