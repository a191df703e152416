"""With many ranks, one rank per host writes files, others once they are suspected; records pass up a tree."""

import many_ranks
import pytest
from whole_tensors import rows


@pytest.mark.parametrize(("hosts", "writers"), [(1, {0}), (2, {0, 2}), (4, {0, 1, 2, 3})])
def test_one_rank_a_host_writes_and_whoever_is_suspected(four_ranks, tmp_path, hosts, writers):
    known = four_ranks.run(many_ranks.run, tmp_path, 3, hosts)
    assert all(k and k[0]["name"] == "inner.0.weight" for k in known)
    assert {k[0]["kind"] for k in known} == {"replica_mismatch"}
    suspected = {s["rank"] for s in known[0][0]["suspects"]}
    found = {int(p.name[4:]) for p in tmp_path.glob("rank*") if any(p.glob("*.csv"))}
    assert found == writers | {known[0][0]["rank"]}
    assert 3 in suspected
    table = rows(tmp_path / "global", "parameter")
    assert {step for step, _ in table} == set(range(24))
    assert len(table) == 24 * 9
