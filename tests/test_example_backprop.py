import importlib.util
from pathlib import Path

import torch

SOURCE = Path(__file__).parent.parent / "examples" / "backprop.py"


def test_it_runs(capsys):
    threads = torch.get_num_threads()
    spec = importlib.util.spec_from_file_location("example_backprop", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(["--epochs", "1"])
    torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    assert "ClippedConvolution" in printed and "test accuracy" in printed and "Privacy statement" in printed
