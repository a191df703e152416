"""An embedding never trains."""

from case import Case, Expect


def _build(run):
    run.parameter("pos.weight", "stages.0.conv.weight").requires_grad_(False)


CASE = Case(
    "F37",
    "an embedding that never trains",
    Expect(("update",), ("frozen",), {"gpt": ("pos.weight",), "cnn": ("stages.0.conv.weight",)}, within=20),
    build=_build,
    from_start=True,
)
