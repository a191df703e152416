"""A device computes wrongly now and then."""

import torch
from case import Case, Expect
from families import ALL, DENSE


def _now_and_then(run):
    """One step in four, by a draw that depends on the step alone."""
    return run.harmed and (run.step - run.fault_step) * 7919 % 101 % 4 == 0


def _lost_tile(run):
    """A tile of a product is zero."""

    def hook(module, args, output):
        if not _now_and_then(run):
            return output
        output = output.clone()
        output[: max(len(output) // 4, 1), ..., :8] = 0.0
        return output

    run.place("layer").register_forward_hook(hook)


def _wrong_backward(run):
    """A tile of a weight's gradient has the wrong sign."""

    def hook(gradient):
        if not _now_and_then(run):
            return gradient
        gradient = gradient.clone()
        gradient[:8] *= -1.0
        return gradient

    run.place("weight").register_hook(hook)


def _missed_update(run):
    """One rank does not write a row of a weight."""
    if run.rank == 1:
        run.notes["row"] = run.place("weight").detach()[3].clone()


def _put_back(run):
    if run.rank == 1 and _now_and_then(run):
        run.place("weight").data[3] = run.notes["row"]  # torch counts no write


def _wrong_sum(run):
    """A norm's sum is off by a tenth."""
    run.place("norm").register_forward_hook(lambda m, a, out: out * 1.1 if _now_and_then(run) else out)


def _stuck_bit(run):
    """The highest bit of the mantissa of one element is always set; it was not when the fault sets in."""
    if run.harmed:
        bits = run.place("weight").data.view(-1).view(torch.int32)
        bits[run.notes.setdefault("element", int(((bits >> 22) & 1).argmin()))] |= 1 << 22


CASES = (
    Case(
        "lost_tile",
        "a tile of a layer's output is zero now and then",
        Expect(suspects=(("activation_output", "{layer}*"),), within=30),
        ALL,
        build=_lost_tile,
        source="https://github.com/ROCm/legacy-rocm-build/issues/6595; Cores that don't count (HotOS 2021)",
    ),
    Case(
        "wrong_backward",
        "a tile of a gradient has the wrong sign now and then",
        Expect(
            suspects=(("gradient*", "{weight}"), ("moment_direction", "{weight}"), ("alignment*", "{weight}")),
            within=30,
        ),
        ALL,
        build=_wrong_backward,
        source="https://github.com/ROCm/rocm-libraries/issues/12344 (intermittent incorrect output)",
    ),
    Case(
        "missed_update",
        "one rank does not write a row of a weight now and then",
        Expect(suspects=(("parameter*", "{weight}"), ("update", "{weight}")), within=5),
        DENSE,
        ranks=2,
        before_update=_missed_update,
        after_update=_put_back,
        source="https://github.com/pytorch/pytorch/issues/84803 (Silent data corruption when moving data between GPUs)",
    ),
    Case(
        "wrong_sum",
        "a norm's output is a tenth too large now and then",
        Expect(suspects=(("activation_output", "{norm}*"),), within=30),
        ALL,
        build=_wrong_sum,
        source="https://github.com/ahrefs/ocannl/issues/476 (a column sum that was wrong under load)",
    ),
    Case(
        "stuck_bit",
        "a bit of one weight is always set",
        Expect(suspects=(("parameter*", "{weight}"), ("update", "{weight}"))),
        ALL,
        before_step=_stuck_bit,
        source="https://github.com/jade-hpc-gpu/jade-hpc-gpu.github.io/issues/194 (uncorrectable memory errors); case F11",
    ),
)
