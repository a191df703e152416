"""The quota takes the oldest finished tables first, and those of an incident last."""

from trainsentry.exporters.csv.quota import enforce_quota


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


def test_event_files_and_journals_count_and_blocks_of_an_earlier_start_may_go(tmp_path):
    import os

    rank, events = tmp_path / "rank0", tmp_path / "events"
    rank.mkdir(), events.mkdir()
    files = [rank / "gradient_0-999.csv", rank / "gradient_2000-2999.csv", rank / "gradient_2000-2999.r1.csv"]
    files += [events / f"events.out.tfevents.{i}" for i in range(3)] + [rank / "anomalies.jsonl"]
    for age, path in enumerate(files):
        path.write_text("x" * 1000)
        os.utime(path, (1000 + age, 1000 + age))
    deleted = enforce_quota(rank, 3000, 2500, [], restart=1, events=events)
    assert [p.name for p in deleted] == [
        "gradient_0-999.csv",
        "gradient_2000-2999.csv",
        "events.out.tfevents.0",
        "events.out.tfevents.1",
    ]


def test_a_directory_that_nobody_has_made_needs_no_quota(tmp_path):
    assert enforce_quota(tmp_path / "global", 1, 0, []) == []
