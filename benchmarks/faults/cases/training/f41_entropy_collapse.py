"""Attention sharpens step by step."""

from case import Case, Expect


def _build(run):
    def hook(module, args, output):
        return (
            output * 1.2 ** (run.step - run.fault_step + 1) if run.harmed and run.step < run.fault_step + 25 else output
        )

    run.module("blocks.1.attn.logits", "").register_forward_hook(hook)


CASE = Case(
    "F41",
    "attention entropy collapse",
    Expect(("activation_output",), ("drift", "shift"), {"gpt": ("blocks.1.attn*",)}),
    families=("gpt",),
    build=_build,
)
