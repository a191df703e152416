"""One layer's gradient is a hundred times too large once."""

from case import Case, Expect


def _build(run):
    p = run.parameter("blocks.0.attn.q_proj.weight", "stages.0.conv.weight")
    p.register_hook(lambda g: g * 100 if run.at_fault else g)


CASE = Case(
    "X06",
    "one gradient times 100 at one step",
    Expect(
        ("gradient", "gradient_unreduced"),
        ("spike",),
        {"gpt": ("blocks.0.attn.q_proj.weight",), "cnn": ("stages.0.conv.weight",)},
    ),
    build=_build,
)
