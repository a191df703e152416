"""NaN gets into optimizer state."""

from case import Case, Expect


def _harm(run):
    if run.at_fault:
        p = run.parameter("blocks.0.mlp.fc1.weight", "stages.1.conv.weight")
        key = "exp_avg" if run.optimizer_name == "adamw" else "momentum_buffer"
        run.optimizer.state[p][key].view(-1)[0] = float("nan")


CASE = Case(
    "X09",
    "NaN in optimizer state",
    Expect(
        ("exp_avg", "momentum_buffer"),
        ("nonfinite",),
        {"gpt": ("blocks.0.mlp.fc1.weight",), "cnn": ("stages.1.conv.weight",)},
        hard=True,
        within=1,
    ),
    before_update=_harm,
)
