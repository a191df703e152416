"""The quota takes the oldest finished tables first, and those of an incident last."""

from trainsentry.exporters.quota import enforce_quota


def fill(directory):
    for first in range(0, 500, 100):
        (directory / f"gradient_{first}-{first + 99}.csv").write_text("x" * 1000)


def left(directory):
    return sorted(int(p.name.split("_")[1].split("-")[0]) for p in directory.iterdir())


def test_inside_the_quota_nothing_goes(tmp_path):
    fill(tmp_path)
    assert enforce_quota(tmp_path, 5000, 450, []) == []


def test_the_oldest_go_and_the_current_block_stays(tmp_path):
    fill(tmp_path)
    enforce_quota(tmp_path, 2500, 450, [])
    assert left(tmp_path) == [300, 400]
    enforce_quota(tmp_path, 1, 450, [])
    assert left(tmp_path) == [400]


def test_tables_of_an_incident_go_last(tmp_path):
    fill(tmp_path)
    enforce_quota(tmp_path, 2500, 450, [(120, 130)])
    assert left(tmp_path) == [100, 400]
