"""The place of a call is told by its function, and by every line of its stack."""

from fnmatch import fnmatch

from trainsentry.collectors.calls.call_stacks import call_site, is_chosen


def synchronise():
    return call_site(("torch",))


def test_a_site_has_the_innermost_function_and_all_lines():
    here, line = __file__, test_a_site_has_the_innermost_function_and_all_lines.__code__.co_firstlineno + 2
    site = synchronise()
    assert site[0] == f"{here}:synchronise"
    assert site[1] == f"{here}:{synchronise.__code__.co_firstlineno + 1}"
    assert f"{here}:{line}" in site


def test_a_pattern_chooses_by_function_or_by_line():
    line = test_a_pattern_chooses_by_function_or_by_line.__code__.co_firstlineno + 2
    site = synchronise()
    assert is_chosen(site, ["*:synchronise"])
    assert is_chosen(site, [f"*test_call_stacks.py:{line}"])
    assert not is_chosen(site, [f"*test_call_stacks.py:{line + 1}", "*:other"])
    assert not any(fnmatch(name, "*:call_site") for name in site)
