"""A dump's JSON has msprobe's schema, and its file names cannot leave the folder."""

import json

from trainsentry.exporters.dump_files import DumpFolder


def test_entries_stand_as_msprobe_writes_them(tmp_path):
    folder = DumpFolder(tmp_path, framework="pytorch", step=3, moment="before_update", incident=1)
    folder.add("Module.a.Block.forward.0", "input_args", "0", {"type": "torch.Tensor"})
    folder.add("Module.a.fc.Linear.forward.0", "input_kwargs", "mask", {"type": "torch.Tensor"})
    folder.add("Module.a.fc.Linear.forward.0", "parameters", "weight", {"type": "torch.Tensor"})
    folder.add("Module.a.fc.Linear.backward.0", "input", "0", {"type": "torch.Tensor"})
    folder.add("Module.a.fc.Linear.parameters_grad.0", "parameters_grad", "weight", {"type": "torch.Tensor"})
    folder.write()
    data = json.loads((tmp_path / "dump.json").read_text())
    assert {"task", "level", "framework", "dump_data_dir", "data"} <= set(data)
    forward = data["data"]["Module.a.fc.Linear.forward.0"]
    assert set(forward) == {"input_args", "input_kwargs", "output", "parameters"}
    assert forward["input_kwargs"] == {"mask": {"type": "torch.Tensor"}}
    assert data["data"]["Module.a.fc.Linear.backward.0"] == {"input": [{"type": "torch.Tensor"}]}
    assert data["data"]["Module.a.fc.Linear.parameters_grad.0"] == {"weight": [{"type": "torch.Tensor"}]}
    parents = json.loads((tmp_path / "construct.json").read_text())
    assert parents["Module.a.fc.Linear.forward.0"] == "Module.a.Block.forward.0"
    assert parents["Module.a.Block.forward.0"] is None


def test_a_name_with_slashes_stays_in_the_folder(tmp_path):
    folder = DumpFolder(tmp_path, framework="pytorch", step=0, moment="before_update", incident=1)
    path = folder.tensor_path("../../etc/passwd.pt")
    assert path.parent == folder.tensor_directory
