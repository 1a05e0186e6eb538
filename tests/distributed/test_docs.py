"""The training script of docs/scaling.md runs on two ranks."""

from __future__ import annotations

import io
import os
import runpy
import socket
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed.world import world
from tests.docs.documented import BLOCK, DOCS, TITLE

pytestmark = pytest.mark.integration


def script() -> str:
    blocks = BLOCK.findall((DOCS / "scaling.md").read_text())
    (found,) = [content for _, options, content in blocks if TITLE.search(options)]
    return str(found)


def run_script(rank: int, folder: Path, port: int) -> str:
    """Run it as torchrun does, and return what it prints."""
    dist.destroy_process_group()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.chdir(folder)
    printed = io.StringIO()
    with redirect_stdout(printed):
        runpy.run_path("train.py", run_name="__main__")
    return printed.getvalue()


def test_the_script_of_the_page_trains_on_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(script())
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with world(2) as ranks:
        first, second = ranks.run(run_script, tmp_path, port)
    assert "epsilon" in first and not second
    assert (tmp_path / "run.ledger").exists() and (tmp_path / "checkpoint" / "clipwise.pt").exists()
