"""The scripts of docs/scaling.md run on two ranks."""

from __future__ import annotations

import io
import os
import runpy
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch.distributed as dist

from clipwise.ledger import ledger
from tests.distributed.world import World, world
from tests.docs.documented import BLOCK, DOCS, TITLE

pytestmark = pytest.mark.integration


def scripts() -> dict[str, str]:
    blocks = BLOCK.findall((DOCS / "scaling.md").read_text())
    return {title[1]: content for _, options, content in blocks if (title := TITLE.search(options))}


def run_script(rank: int, name: str, folder: Path, port: int) -> str:
    """Run it as torchrun does, which holds the store of the ranks, and return what it prints."""
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    os.chdir(folder)
    printed = io.StringIO()
    with redirect_stdout(printed):
        runpy.run_path(name, run_name="__main__")
    return printed.getvalue()


def run_on(ranks: World, name: str, folder: Path) -> list[str]:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # at a port that is free
    return ranks.run(run_script, name, folder, store.port)


def test_the_script_of_the_page_trains_on_two_ranks_and_continues(tmp_path: Path) -> None:
    script = scripts()["train.py"]
    (tmp_path / "begun.py").write_text(script.replace("16", "11"))  # within the second epoch
    (tmp_path / "train.py").write_text(script)
    with world(2) as ranks:
        run_on(ranks, "begun.py", tmp_path)
        assert ledger.read(tmp_path / "run.ledger").position == 11
        for _ in range(2):  # the second time it has no steps left
            first, second = run_on(ranks, "train.py", tmp_path)
            assert "releases     16 steps" in first and not second
    assert (tmp_path / "checkpoint" / "clipwise.pt").exists()
    assert ledger.read(tmp_path / "run.ledger").position == 16


def test_the_script_of_the_page_with_tensor_parallelism(tmp_path: Path) -> None:
    (tmp_path / "tensor_parallel.py").write_text(scripts()["tensor_parallel.py"])
    with world(2) as ranks:
        first, second = run_on(ranks, "tensor_parallel.py", tmp_path)
    assert "4 steps" in first and not second
