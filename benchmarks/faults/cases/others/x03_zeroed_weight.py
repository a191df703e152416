"""A layer's weights are zeroed."""

from case import Case, Expect


def _harm(run):
    if run.at_fault:
        run.parameter("blocks.2.mlp.fc1.weight", "stages.2.conv.weight").data.mul_(1e-6)  # torch counts no write


CASE = Case(
    "X03",
    "a layer's weights vanish",
    Expect(
        ("parameter",),
        ("dead", "spike", "shift"),
        {"gpt": ("blocks.2.mlp.fc1.weight",), "cnn": ("stages.2.conv.weight",)},
    ),
    before_step=_harm,
)
