"""Under DeepSpeed's ZeRO 0 to 3 and FSDP1, monitor and debugger together change no bit and record every module."""

import importlib.util
import json

import debugged_strategies
import pytest

deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
ENGINES = ("DeepSpeed", "Zero1", "Zero2", "Zero3")
MODULES = {"inner.0.Linear", "inner.1.GELU", "inner.2.Linear", "norm.LayerNorm", "module.Linear"}


@pytest.mark.parametrize("name", ["Fsdp1", *(pytest.param(n, marks=deepspeed) for n in ENGINES)])
def test_monitor_and_debugger_change_no_bit_and_record_forward_and_backward(two_ranks, tmp_path, name):
    bare = two_ranks.run(debugged_strategies.train, name, tmp_path / "bare", "bare")
    watched = two_ranks.run(debugged_strategies.train, name, tmp_path, "monitor and debugger")
    assert [weights for weights, _, _ in watched] == [weights for weights, _, _ in bare]
    assert [failures for _, _, failures in watched] == [{}, {}]
    for rank in range(2):
        data = json.loads((tmp_path / f"dump/step1/rank{rank}/dump.json").read_text())["data"]
        for module in MODULES:
            for direction in ("forward", "backward"):
                assert any(key.startswith("Module.") and f"{module}.{direction}" in key for key in data), (module, rank)
        assert list((tmp_path / "monitor" / f"rank{rank}").glob("gradient_*.csv"))
