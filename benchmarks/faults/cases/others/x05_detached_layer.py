"""A layer's gradient is zero from one step on."""

from case import Case, Expect


def _build(run):
    p = run.parameter("blocks.2.attn.out_proj.weight", "stages.2.conv.weight")
    p.register_hook(lambda g: g * 0 if run.harmed else g)


CASE = Case(
    "X05",
    "a gradient that is zero from one step on",
    Expect(
        ("gradient", "gradient_unreduced"),
        ("dead", "underflow"),
        {"gpt": ("blocks.2.attn.out_proj.weight",), "cnn": ("stages.2.conv.weight",)},
    ),
    build=_build,
)
