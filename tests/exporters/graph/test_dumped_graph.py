"""The tree of a dump is msprobe's, and whatever parents a file names, it is a tree."""

import json

import pytest

from trainsentry.exporters.dumps.dump_reader import read_dumps
from trainsentry.exporters.files.foreign_files import InputError
from trainsentry.exporters.graph.call_graph import COLLECTION, ROOT, number_micro_steps
from trainsentry.exporters.graph.collective_peers import match_collectives
from trainsentry.exporters.graph.dumped_graph import graph_of_dump

FC, ACT, NET = "Module.fc.Linear", "Module.act.ReLU", "Module.Net"


def graph(folder, construct, data=None, rank=0):
    folder = folder / "step0" / f"rank{rank}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "dump.json").write_text(json.dumps({"task": "statistics", "data": data or {}}))
    (folder / "construct.json").write_text(json.dumps(construct))
    [dump] = read_dumps(folder)
    return graph_of_dump(dump)


def parents(found):
    return {name: node.parent for name, node in found.nodes.items() if name != ROOT}


def test_neighbouring_operations_below_the_root_share_a_collection(tmp_path):
    construct = dict.fromkeys(["Tensor.a.0.forward", "Tensor.b.0.forward", f"{FC}.forward.0", "Tensor.c.0.forward"])
    found = graph(tmp_path, construct)
    assert found.root.children == ["Apis_Between_Modules.0", f"{FC}.forward.0", "Tensor.c.0.forward"]
    collection = found.nodes["Apis_Between_Modules.0"]
    assert (collection.kind, collection.children) == (COLLECTION, ["Tensor.a.0.forward", "Tensor.b.0.forward"])


def test_a_backward_pass_without_parent_has_that_of_its_forward_pass(tmp_path):
    construct = {
        f"{FC}.forward.0": None,
        "Functional.linear.0.forward": f"{FC}.forward.0",
        f"{FC}.backward.0": None,
        "Functional.linear.0.backward": None,
    }
    assert parents(graph(tmp_path, construct))["Functional.linear.0.backward"] == f"{FC}.backward.0"


def test_a_module_after_an_in_place_one_does_not_lie_in_it(tmp_path):
    a, b, relu = "Module.a.Block", "Module.a.fc.Linear", "Module.a.relu.ReLU"
    forward = {f"{a}.forward.0": None, f"{b}.forward.0": f"{a}.forward.0", f"{relu}.forward.0": f"{a}.forward.0"}
    backward = {
        f"{a}.backward.0": None,
        f"{relu}.backward.0": f"{a}.backward.0",
        f"{b}.backward.0": f"{relu}.backward.0",
    }
    assert parents(graph(tmp_path, forward | backward))[f"{b}.backward.0"] == f"{a}.backward.0"


def test_gradients_of_parameters_lie_in_the_last_backward_pass(tmp_path):
    construct = dict.fromkeys([f"{FC}.forward.0", f"{FC}.backward.0", f"{FC}.backward.1"])
    data = {
        f"{FC}.parameters_grad.0": {
            "weight": [{"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2], "Max": 1}]
        }
    }
    found = graph(tmp_path, construct, data)
    node = found.nodes[f"{FC}.parameters_grad.0"]
    assert (node.parent, node.values[0].name) == (f"{FC}.backward.1", f"{FC}.parameters_grad.0.weight")


def test_each_forward_pass_after_a_backward_pass_begins_a_micro_step(tmp_path):
    construct = dict.fromkeys([f"{NET}.{way}.{n}" for n in range(2) for way in ("forward", "backward")])
    construct["Functional.linear.1.forward"] = f"{NET}.forward.1"
    found = graph(tmp_path, construct)
    assert number_micro_steps(found) == 2
    assert [found.nodes[name].micro_step for name in (f"{NET}.backward.0", "Functional.linear.1.forward")] == [0, 1]


def test_micro_steps_that_msprobe_writes_under_megatron_are_taken(tmp_path):
    construct = {
        "megatron_micro_step_number": 1,
        f"{NET}.forward.0": [None, 0],
        f"{FC}.forward.0": [f"{NET}.forward.0", 0],
        f"{NET}.forward.1": [None, 1],
    }
    found = graph(tmp_path, construct)
    assert parents(found)[f"{FC}.forward.0"] == f"{NET}.forward.0"
    assert (number_micro_steps(found), found.nodes[f"{NET}.forward.1"].micro_step) == (2, 1)


@pytest.mark.parametrize(
    "construct",
    [
        {"a": "b", "b": "a"},
        {"a": "a"},
        {"a": "b", "b": "c", "c": "b", "d": "a"},
        {"a": "not there"},
        {ROOT: "a", "a": ROOT},
        {"a": 3, "b": ["x"], "c": {"d": 1}, "": None},
    ],
)
def test_any_parents_make_a_tree_with_every_call_in_it(tmp_path, construct):
    found = graph(tmp_path, construct)
    names = [node.name for node in found.in_order()]
    assert len(names) == len(set(names)) == len(found.nodes)
    assert construct.keys() <= set(names)
    assert all(found.path_to(name)[0] == ROOT for name in names)


def test_a_deep_tree_is_walked_without_recursion(tmp_path):
    construct = {f"Module.m{i}": f"Module.m{i - 1}" if i else None for i in range(20_000)}
    found = graph(tmp_path, construct)
    assert sum(1 for _ in found.in_order()) == 20_001


def test_a_dump_without_a_tree_says_which_levels_have_one(tmp_path):
    with pytest.raises(InputError, match="level L0 or mix"):
        graph(tmp_path, {})


def collective(name, **arguments):
    """Return the entry of a collective with these arguments."""
    values = {key: {"type": "int", "value": value} for key, value in arguments.items() if key != "group"}
    group = {"type": "torch.ProcessGroup", "group_ranks": [0, 1], "group_id": arguments.get("group")}
    return {name: {"input_args": [], "input_kwargs": {**values, **({"group": group} if group["group_id"] else {})}}}


def test_collectives_and_messages_of_ranks_find_each_other(tmp_path):
    reduce, last = "Distributed.all_reduce.0.forward", "Distributed.all_reduce.1.forward"
    send, receive = "Distributed.send.0.forward", "Distributed.recv.0.forward"
    sent = "Distributed.broadcast.0.forward"
    ours = (
        collective(reduce, group="x")
        | collective(last, group="x")
        | collective(send, dst=1)
        | collective(sent, group="x", src=0)
    )
    theirs = collective(last, group="x") | collective(receive, src=0) | collective(sent, group="x", src=0)
    graphs = [graph(tmp_path, dict.fromkeys(data), data, rank) for rank, data in enumerate((ours, theirs))]
    match_collectives(graphs)
    assert graphs[0].nodes[reduce].peers == {"communications_type": "send_receive", "nodes_info": {"1": ["Nan", last]}}
    assert graphs[0].nodes[last].peers == {}
    assert graphs[0].nodes[send].peers == {"communications_type": "send", "nodes_info": {"1": ["Nan", receive]}}
    assert graphs[1].nodes[receive].peers["communications_type"] == "receive"
    assert [g.nodes[sent].peers["communications_type"] for g in graphs] == ["send", "receive"]
