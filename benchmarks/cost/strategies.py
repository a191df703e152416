"""Checks which features work under each distribution strategy, and their cost: the table of strategies in RESULTS.md.

Two ranks on this machine (four for the hybrid strategies), gloo, one thread each. Every column is measured as in the
tests: by gathering and comparing whole tensors, planting a NaN, requesting a stop. The overhead is the ratio of median
step times with the default configuration and without a monitor, in alternating rounds of one process, for an MLP of
4.6 million parameters.

    python benchmarks/cost/strategies.py [Ddp Fsdp2 …]
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "helpers"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "workers"))

import before_reduction as reduction
import sharded_training
import stopping_training

sys.path.append(str(Path(__file__).parents[1]))

import strategy_steps
from machine import describe_machine
from rank_pool import RankFailure, RankPool
from whole_tensors import assert_global_equals

FOUR = ("Hsdp", "Fsdp1Hybrid")
NAMES = [n for n in sharded_training.STRATEGIES if n not in {"Strategy", "Plain"}]
NOT_REDUCED = ("TensorParallel",)
QUANTITIES = ("activation_output", "activation_grad_output", "gradient", "parameter", "update", "exp_avg")


def collected(pool: RankPool, name: str, out: Path) -> tuple[str, str]:
    """Return the number of quantities that every rank wrote, and whether the tables of whole tensors are right."""
    steps = pool.run(sharded_training.train, name, out)[0]
    written = [sum(any((out / f"rank{r}").glob(f"{q}_*.csv")) for q in QUANTITIES) for r in range(pool.size)]
    try:
        assert_global_equals(out / "global", steps)
    except AssertionError:
        return f"{min(written)} of {len(QUANTITIES)}", "no"
    return f"{min(written)} of {len(QUANTITIES)}", "yes"


def before_reduction(pool: RankPool, name: str, out: Path) -> str:
    """Return whether a NaN in rank 1's own gradient appears before reduction on rank 1 alone."""
    if name in NOT_REDUCED:
        return "nothing is reduced"
    pool.run(sharded_training.train, name, out, steps=1, config=reduction.CONFIG, poison=reduction.poison, gather=False)
    before = reduction.by_rank(out, "gradient_unreduced")
    clean = all(row["nans"] == "0" for row in before[0].values())
    return "yes" if clean and before[1] and all(int(row["nans"]) for row in before[1].values()) else "no"


def stops(pool: RankPool, name: str, out: Path) -> str:
    """Return whether a request on the last rank ends all ranks at one step."""
    found = pool.run(stopping_training.run, name, out, fault="request", rank=pool.size - 1)
    return "yes" if {f[0] for f in found} == {"TrainingStopped"} and len({(f[1], f[3]) for f in found}) == 1 else "no"


def main() -> None:
    """Print the table."""
    print(describe_machine())
    print("\n| strategy | ranks | collected | global equals reference | before reduction | stop | overhead |")
    print("|---|---|---|---|---|---|---|")
    pools: dict[int, RankPool] = {}
    for name in sys.argv[1:] or NAMES:
        size = 4 if name.startswith(FOUR) else 2
        pool = pools.get(size) or pools.setdefault(size, RankPool(size))
        with tempfile.TemporaryDirectory() as directory:
            out = Path(directory)
            try:
                cells = [
                    *collected(pool, name, out / "a"),
                    before_reduction(pool, name, out / "b"),
                    stops(pool, name, out / "c"),
                    "{:.2f}".format(pool.run(strategy_steps.overhead, name, out / "d", timeout=300)[0]),
                ]
            except RankFailure as error:
                cells = [f"failed: {error.kind}"]
                pools.pop(size).close()
        print(f"| {name} | {size} | {' | '.join(cells)} |", flush=True)
    for pool in pools.values():
        pool.close()


if __name__ == "__main__":
    main()
