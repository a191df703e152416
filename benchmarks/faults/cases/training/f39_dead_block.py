"""A block's output is multiplied by 1e-4."""

from case import Case, Expect


def _build(run):
    def hook(module, args, output):
        return output * 1e-4 if run.harmed else output

    run.module("blocks.1.mlp", "stages.1.act").register_forward_hook(hook)


CASE = Case(
    "F39",
    "a dead block",
    Expect(
        ("activation_output",),
        ("dead",),
        {"gpt": ("blocks.1.mlp.output*",), "cnn": ("stages.1.act.output*", "stages.1.output*")},
    ),
    build=_build,
)
