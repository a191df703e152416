"""Only this user can read files of tensors, and none is written through a link or a second name."""

import os
import stat

import pytest
import torch

from trainsentry.collectors.shared.private_files import make_private_folder, new_private_file
from trainsentry.collectors.torch.saving import load_tensor, save_again, save_tensor
from trainsentry.exporters.dumps.step_dump import StepDump


@pytest.fixture(autouse=True)
def _open_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_tensor_and_its_second_name_can_be_read_by_nobody_else(tmp_path):
    save_tensor(torch.ones(3), tmp_path / "one.pt")
    save_again(tmp_path / "one.pt", tmp_path / "again.pt")
    assert mode(tmp_path / "one.pt") == mode(tmp_path / "again.pt") == 0o600
    assert load_tensor(tmp_path / "again.pt").tolist() == [1.0] * 3


def test_a_tensor_that_is_saved_again_is_a_new_file_for_this_user_alone(tmp_path):
    path, other = tmp_path / "one.pt", tmp_path / "other"
    other.write_bytes(b"to stay as it is")
    for spoil in (lambda: path.hardlink_to(other), lambda: path.symlink_to(other), lambda: path.write_bytes(b"old")):
        spoil()
        save_tensor(torch.ones(3), path)
        assert mode(path) == 0o600
        path.unlink()
    assert other.read_bytes() == b"to stay as it is"


def test_a_folder_of_tensors_is_private_and_what_is_above_it_is_not(tmp_path):
    dump = StepDump(tmp_path / "step3" / "rank0", {})
    with new_private_file(dump.tensor_path("w.pt")) as file:
        file.write(b"x")
    dump.close()
    assert mode(tmp_path / "step3" / "rank0" / "dump_tensor_data") == 0o700
    assert mode(tmp_path / "step3" / "rank0") == 0o777
    assert mode(tmp_path / "step3" / "rank0" / "dump.json") == 0o644
    make_private_folder(tmp_path / "step3" / "rank0" / "dump_tensor_data")  # it is there already


def test_a_narrower_umask_holds(tmp_path):
    os.umask(0o277)
    save_tensor(torch.ones(3), tmp_path / "one.pt")
    os.umask(0)
    assert mode(tmp_path / "one.pt") == 0o400
