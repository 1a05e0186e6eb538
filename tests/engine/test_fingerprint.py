"""Which changes make another run, so that a resume file is not used."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

from clipwise import PerExample
from clipwise.engine import fingerprint
from tests.runs import SIZE, data, network, private_run, sgd


def with_one_record_changed() -> TensorDataset:
    changed = data()
    changed.tensors[0][17, 2] += 1
    return changed


def test_one_record_shows_in_the_digest_of_the_data() -> None:
    one, other = data(), with_one_record_changed()
    assert fingerprint.of_data(one) == fingerprint.of_data(data()) != fingerprint.of_data(other)
    first, second = (Subset(whole, range(SIZE)) for whole in (one, other))
    assert fingerprint.of_data(first) != fingerprint.of_data(second)
    assert fingerprint.of_data(first) != fingerprint.of_data(Subset(one, range(SIZE)[::-1]))


def test_values_and_layers_show_in_the_digest_of_a_model() -> None:
    relu = network()
    relu[1] = nn.ReLU()
    digests = {fingerprint.of_model(model) for model in (network(), network(), network(seed=1), relu)}
    assert len(digests) == 3


def test_settings_show_in_the_digest_of_a_configuration() -> None:
    runs = [private_run(), private_run(), private_run(noise_multiplier=1.5), private_run(clipping=PerExample(2.0))]
    for momentum in (0.5, 0.9):
        model = network()
        runs.append(private_run(model, sgd(model, momentum=momentum)))
    for beta in (0.5, 0.9):
        model = network()
        runs.append(private_run(model, torch.optim.Adam(model.parameters(), betas=(beta, 0.999))))
    assert len({private.state_dict()["fingerprint"] for _, private in runs}) == 7
