import pytest
import torch

from clipwise.errors import ConfigurationError
from clipwise.recipes.run_folder import RunFolder, fresh_folder


def test_an_empty_folder_is_used_and_no_other_is_touched(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    assert fresh_folder(tmp_path / "empty") == tmp_path / "empty"
    assert fresh_folder(tmp_path / "file") == tmp_path / "file-2"
    with pytest.raises(ConfigurationError, match="--out"):
        fresh_folder(tmp_path / "file" / "inside")


def test_what_is_written_is_read_back(tmp_path):
    folder = RunFolder(tmp_path)
    folder.write_config({"run": {"name": "a"}})
    folder.record("progress", step=1)
    folder.record("released", name="accuracy", value=0.5)
    folder.save_model({"w": torch.arange(3.0)})
    assert RunFolder.existing(tmp_path).read_config() == {"run": {"name": "a"}}
    assert folder.progress() == [{"kind": "progress", "step": 1}]
    assert folder.released() == [{"kind": "released", "name": "accuracy", "value": 0.5}]
    assert torch.equal(folder.load_model()["w"], torch.arange(3.0))


def test_other_folders_and_unfinished_runs_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="not the folder of a run"):
        RunFolder.existing(tmp_path)
    with pytest.raises(ConfigurationError, match="--resume"):
        RunFolder(tmp_path).load_model()
