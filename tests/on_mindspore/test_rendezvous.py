"""Ranks that cannot meet refuse to stop alone, and the address of their rendezvous is checked."""

import pytest
from cells import net, train, watch
from mindspore import nn

import trainsentry


def test_a_rank_that_is_left_out_may_say_everything_where_the_ranks_do_not_meet(out, monkeypatch):
    monkeypatch.setenv("MS_WORKER_NUM", "2")
    monkeypatch.setenv("MS_NODE_ID", "1")
    monkeypatch.setenv("TRAINSENTRY_MEET_AT", "off")
    model = net(layers=1)
    optimizer = nn.SGD(model.trainable_params(), 1e-2)
    with watch(out, model, optimizer, ranks=[0]) as monitor:
        monitor.log(loss=1.0)
        train(model, optimizer, 2, None)
        monitor.step()
        monitor.step_ended()
        monitor.flush()
        with pytest.raises(RuntimeError, match="cannot agree on a stop"):
            monitor.request_stop("enough")
    assert not (out / "rank1").exists()


@pytest.mark.parametrize("named", ["host", "host:", ":80", "host:port"])
def test_a_place_to_meet_is_a_host_and_a_number(out, monkeypatch, named):
    monkeypatch.setenv("MS_WORKER_NUM", "2")
    monkeypatch.setenv("TRAINSENTRY_MEET_AT", named)
    model = net(layers=1)
    with pytest.raises(ValueError, match=r"TRAINSENTRY_MEET_AT.*host:port of rank 0, or off"):
        watch(out, model, None)


def test_ranks_that_do_not_know_of_each_other_refuse_to_stop_alone(out, monkeypatch):
    monkeypatch.setenv("MS_WORKER_NUM", "2")
    monkeypatch.setenv("MS_NODE_ID", "1")
    model = net(layers=1)
    optimizer = nn.SGD(model.trainable_params(), 1e-2)
    with pytest.raises(trainsentry.ConfigError, match="cannot agree on a stop"):
        watch(out, model, optimizer, on_incident={"stop": True})
    with watch(out, model, optimizer) as monitor:
        with pytest.raises(RuntimeError, match="cannot agree on a stop"):
            monitor.request_stop("enough")
        train(model, optimizer, 2, monitor)
    assert (out / "rank1" / "gradient_0-999.csv").exists()
    assert not (out / "run.json").exists()
