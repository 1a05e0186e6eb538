"""The parts of the data."""

import torch
from torch.utils.data import TensorDataset

from experiments import data
from experiments.normalization import sets

CPU = torch.device("cpu")


def rows_of(part):
    return {x.numpy().tobytes() for x in part.tensors[0]}


def test_parts_share_no_record():
    found = sets.load("digits", 28, None, CPU, judged_by="test", trains_on_all=False)
    parts = [rows_of(part) for part in (found.train, found.validation, found.public)]
    assert all(parts) and not (parts[0] & parts[1] or parts[0] & parts[2] or parts[1] & parts[2])
    assert found.train.tensors[0].shape[1:] == (1, 28, 28)


def test_the_final_run_takes_the_validation_part_and_never_the_public_one():
    apart, all_of_it = (
        sets.load("digits", 28, None, CPU, judged_by="test", trains_on_all=flag) for flag in (False, True)
    )
    assert rows_of(all_of_it.train) == rows_of(apart.train) | rows_of(apart.validation)
    assert len(all_of_it.validation) == 0 and rows_of(all_of_it.public) == rows_of(apart.public)


def test_public_rows_are_public():
    found = sets.load("digits", 28, None, CPU, judged_by="test", trains_on_all=True)
    rows = sets.public_rows("digits", 28, None, CPU)
    assert len(rows) == 128 and {x.numpy().tobytes() for x in rows} <= rows_of(found.public)


def test_while_settings_are_chosen_the_test_part_is_not_read(monkeypatch):
    asked, original = [], data.images
    monkeypatch.setattr(data, "images", lambda name, train, folder: asked.append(train) or original(name, train))
    found = sets.load("digits", 28, None, CPU, judged_by="validation", trains_on_all=True)
    assert asked == [True] and found.held_out is not None and len(found.held_out) == 144
    assert not rows_of(found.train) & rows_of(found.held_out)


def test_large_images_are_cut_to_their_middle(monkeypatch):
    x = torch.arange(32.0).expand(20, 3, 32, 32)
    monkeypatch.setattr(data, "images", lambda *_: TensorDataset(x, torch.zeros(20).long()))
    found = sets.load("cifar10", 24, None, CPU, judged_by="test", trains_on_all=True)
    assert found.train.tensors[0].shape[1:] == (3, 24, 24)
    assert torch.equal(found.train.tensors[0][:1, :, :1, :1], data.look("cifar10").standardised(x[:1, :, :1, 4:5]))
