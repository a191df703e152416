"""NaN in one rank's gradient before it is reduced."""

from case import Case, Expect


def _harm(run):
    def hook(gradient):
        if run.at_fault and run.rank == 1:
            gradient = gradient.clone()
            gradient.view(-1)[0] = float("nan")
        return gradient

    run.parameter("blocks.2.mlp.fc1.weight", "stages.2.conv.weight").register_hook(hook)


CASE = Case(
    "F02",
    "NaN in one rank's local gradient",
    Expect(
        ("gradient_unreduced",),
        ("nonfinite",),
        {"gpt": ("blocks.2.mlp.fc1.weight",), "cnn": ("stages.2.conv.weight",)},
        rank=1,
        hard=True,
        within=1,
    ),
    ranks=2,
    build=_harm,
)
