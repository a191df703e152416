"""State of the optimizer belongs to another parameter, step or rank."""

from case import Case, Expect
from families import ALL, DENSE

MOMENT = ("exp_avg*", "moment_direction", "alignment*", "optimizer*")
OF_WEIGHT = tuple((quantity, "{weight}") for quantity in MOMENT)
OF_BOTH = (*OF_WEIGHT, *((quantity, "{other_weight}") for quantity in MOMENT))


def _state(run, word="weight"):
    return run.optimizer.state[run.place(word)]


def _swapped(run):
    if run.at_fault:
        first, second = _state(run), _state(run, "other_weight")
        first["exp_avg"], second["exp_avg"] = second["exp_avg"], first["exp_avg"]


def _stale(run):
    if run.harmed:
        kept = run.notes.setdefault("kept", _state(run)["exp_avg"].clone())
        _state(run)["exp_avg"].copy_(kept)


def _other_shard(run):
    """The halves of a sharded moment change places."""
    if run.at_fault:
        square = _state(run)["exp_avg_sq"]
        square.copy_(square.view(-1).roll(square.numel() // 2).view_as(square))


def _counter(run):
    if run.at_fault:
        for state in run.optimizer.state.values():
            state["step"].zero_()


def _one_lost(run):
    if run.at_fault:
        del run.optimizer.state[run.place("weight")]


def _other_rank(run):
    if run.at_fault and run.rank == 1:
        moment = _state(run)["exp_avg"]
        moment.copy_(moment.flip(0))


CASES = (
    Case(
        "moments_swapped",
        "the first moments of two weights change places",
        Expect(suspects=OF_BOTH),
        ALL,
        before_step=_swapped,
        source="https://github.com/facebookresearch/fairscale/issues/380; https://github.com/X-LANCE/text2sql-lgesql/issues/18",
    ),
    Case(
        "stale_moment",
        "the first moment of a weight is a copy that stays as it was",
        Expect(suspects=OF_WEIGHT),
        ALL,
        before_step=_stale,
        source="https://github.com/facebookresearch/schedule_free/issues/32 (state and parameter part after a load)",
    ),
    Case(
        "moment_of_other_shard",
        "the second moment's shards change places",
        Expect(suspects=OF_WEIGHT),
        ALL,
        before_step=_other_shard,
        source="https://github.com/deepspeedai/DeepSpeed/pull/5105 (Fix alignment of optimizer states when loading)",
    ),
    Case(
        "step_counter_reset",
        "Adam's step counters start anew, its moments stay",
        Expect(suspects=(("optimizer*", "*"), ("step", "*"), ("exp_avg*", "*"), ("update", "*"))),
        ALL,
        before_step=_counter,
        source="https://github.com/huggingface/candle/pull/3819; https://github.com/goodfire-ai/spd/issues/616",
    ),
    Case(
        "one_state_lost",
        "the state of one weight is lost",
        Expect(suspects=(*OF_WEIGHT, ("step", "{weight}"))),
        ALL,
        before_step=_one_lost,
        source="https://github.com/pytorch/pytorch/issues/34660 (optimizer state of missing parameters)",
    ),
    Case(
        "moment_of_other_rank",
        "one rank's first moment of a weight is turned about",
        Expect(suspects=(*OF_WEIGHT, ("parameter", "{weight}"), ("update", "{weight}"))),
        DENSE,
        ranks=2,
        before_step=_other_rank,
        source="https://github.com/NVIDIA/Megatron-LM/pull/6920 (a resumed run continues from a different model on some ranks)",
    ),
)
