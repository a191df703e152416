"""A recorded run gives the same incidents as the live one, over several starts and with any names."""

import csv
from collections import OrderedDict

import pytest
import torch
from tiny_models import flip_bit, mlp, train
from written_files import fail

import trainsentry
from trainsentry.collectors.series import SeriesTable
from trainsentry.exporters.csv.table_rows import RowKey
from trainsentry.monitor.offline.history import diagnose, records_of
from trainsentry.monitor.offline.recorded_table import layout_of, series_of


def run(out, at, layer, **config):
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with trainsentry.TrainMonitor({"output_dir": str(out), **config}).watch(model, optimizer) as monitor:
        train(
            model, optimizer, 30, monitor, before_step=lambda s: flip_bit(model[layer].weight, 3) if s == at else None
        )
    return monitor.incidents


def test_two_starts_are_two_stories_and_the_later_one_counts_where_they_overlap(out):
    run(out, 20, 0)
    run(out, 25, 2)
    found = diagnose([out / "rank0"], fail)
    assert [i.name for i in found] == ["2.weight"]  # the first start's steps were all run again


def test_series_are_defined_in_the_order_in_which_the_run_met_them(out):
    model = torch.nn.Sequential(OrderedDict(zip("zay", mlp(), strict=True)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with trainsentry.TrainMonitor({"output_dir": str(out)}).watch(model, optimizer) as monitor:
        train(model, optimizer, 2, monitor)
    table = SeriesTable()
    list(records_of(out / "rank0", table, fail))
    for quantity in ("gradient", "parameter", "update", "activation_output"):
        [path] = (out / "rank0").glob(f"{quantity}_0*.csv")
        with path.open(newline="") as file:
            first = [row for row in csv.DictReader(file) if row["step"] == "0"]
        wanted = [row["name"] for row in sorted(first, key=lambda row: int(row["order"]))]
        assert [s.name for _, s in table.of_quantity(quantity)] == wanted, quantity
    assert wanted != sorted(wanted)


@pytest.mark.parametrize("statistics", [["norm"], ["max"], ["min", "max", "mean", "norm", "nans", "infs", "zeros"]])
def test_tables_with_few_statistics_are_judged_by_those(out, statistics):
    [live] = run(out, 23, 2, statistics=statistics, collect={"parameters": {"every": 1}})
    (out / "rank0" / "anomalies.jsonl").unlink()
    found = diagnose([out / "rank0"], fail)
    assert found[0].name == live.name == "2.weight"


@pytest.mark.parametrize(
    ("name", "module", "index"),
    [
        ("encoder.layer.0.attention.output.dense.output.0", "encoder.layer.0.attention.output.dense", "0"),
        ("bert.output.input.hidden", "bert.output", "hidden"),
        ("fc@3.output.1.logits", "fc", "1.logits"),
        ("input.0", "", "0"),
    ],
)
def test_the_module_of_an_activation_is_what_stands_before_the_last_input_or_output(name, module, index):
    series = series_of("activation_output", RowKey(0, name, 0))
    assert (series.module, series.index) == (module, index)


def test_a_damaged_shape_is_no_reason_to_give_up():
    assert layout_of("[2, x]", "float32").shape == (2,)
