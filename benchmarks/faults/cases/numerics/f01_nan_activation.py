"""NaN in one activation."""

from case import Case, Expect


def _harm(run):
    def hook(module, args, output):
        if run.at_fault:
            output = output.clone()
            output.view(-1)[3] = float("nan")
        return output

    run.module("blocks.1.mlp", "stages.1.conv").register_forward_hook(hook)


CASE = Case(
    "F01",
    "NaN in one activation",
    Expect(
        ("activation_output",),
        ("nonfinite",),
        {"gpt": ("blocks.1.mlp.output*",), "cnn": ("stages.1.conv.output*",)},
        hard=True,
        within=1,
    ),
    build=_harm,
)
