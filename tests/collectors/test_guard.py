"""A fault of the monitor is logged once, counted, and goes no further."""

import logging
import os

import pytest

from trainsentry.collectors.guard import Guard, PassThrough


def broken():
    raise KeyError("planted")


def test_a_failure_is_contained_logged_once_with_its_traceback_and_switches_the_part_off(caplog):
    guard = Guard()
    calls = []
    with caplog.at_level(logging.ERROR):
        assert guard.run("part", broken) is None
        guard.run("part", calls.append, 1)
        guard.run("other", calls.append, 2)
    assert calls == [2]
    assert guard.failures["part"].count == 1
    assert len(caplog.records) == 1
    assert "in broken" in caplog.text


def test_strict_lets_failures_through():
    with pytest.raises(KeyError):
        Guard(strict=True).run("part", broken)


def test_what_is_meant_for_the_loop_goes_through():
    def stop():
        raise PassThrough("stop")

    with pytest.raises(PassThrough):
        Guard().run("part", stop)


def test_a_forked_child_runs_nothing_of_the_monitor():
    guard = Guard()
    child = os.fork()
    if child == 0:
        ran = []
        guard.run("part", ran.append, 1)
        os._exit(len(ran))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert guard.in_training_process


class Broken(logging.Handler):
    def emit(self, record):
        raise OSError("no space left")


def test_a_handler_of_the_users_that_raises_ends_nothing():
    logger, handler = logging.getLogger("trainsentry"), Broken()
    logger.addHandler(handler)
    try:
        guard = Guard()
        assert guard.run("part", broken) is None
        guard.warn_once("another", "a message")
        guard.refuse("a third", ValueError("odd"))
    finally:
        logger.removeHandler(handler)
    assert set(guard.failures) == {"part", "another", "a third (ValueError)"}
