"""An exponent bit of one activation flips at one step."""

from case import Case, Expect
from training import flip_bit


def _harm(run):
    def hook(module, args, output):
        if run.at_fault:
            output = output.clone()
            flip_bit(output, 17, 30)
        return output

    run.module("blocks.2.mlp.fc1", "stages.2.conv").register_forward_hook(hook)


CASE = Case(
    "F08",
    "exponent bit flip in an activation",
    Expect(
        ("activation_output",),
        ("spike", "nonfinite", "overflow"),
        {"gpt": ("blocks.2.mlp.fc1.output*",), "cnn": ("stages.2.conv.output*",)},
    ),
    build=_harm,
)
