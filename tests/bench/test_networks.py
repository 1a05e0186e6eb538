import pytest
import torch
from torch import nn

from clipwise.bench.networks import build, names
from clipwise.bench.networks.convolutional import Residual
from clipwise.bench.shapes import Tokens, shape_of
from clipwise.bench.workload import Setting, losses_of, make_workload
from clipwise.errors import ConfigurationError

DATA = {"transformer": "imdb", "gpt2-small": "text", "vit-b16": "images-224"}


def data_of(name):
    return DATA.get(name, "images-64" if name.startswith(("resnet", "vgg")) else "mnist")


@pytest.mark.parametrize("name", names())
def test_every_network_gives_one_output_an_example(name):
    shape = shape_of(data_of(name))
    with torch.device("meta"):  # shapes alone: nothing is computed
        model, (x, y) = build(name, shape), shape.draw(3)
        assert losses_of(model(x), y).shape == (3,)


@pytest.mark.parametrize("layers", [18, 34, 50, 101])
def test_a_resnet_has_the_layers_of_its_name(layers):
    with torch.device("meta"):
        model = build(f"resnet{layers}", shape_of("images-64"))
    weighted = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    shortcuts = [b for b in model if isinstance(b, Residual) and not isinstance(b.shortcut, nn.Identity)]
    assert len(weighted) - len(shortcuts) == layers


@pytest.mark.parametrize("layers", [11, 16])
def test_a_vgg_has_the_layers_of_its_name(layers):
    with torch.device("meta"):
        model = build(f"vgg{layers}", shape_of("images-64"))
    assert len([m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]) == layers


def test_frozen_batch_norm_trains_nothing_and_group_norm_does():
    trained = {}
    for name in ("resnet18", "resnet18-groupnorm"):
        with torch.device("meta"):
            trained[name] = sum(p.numel() for p in build(name, shape_of("images-64")).parameters())
    assert trained["resnet18"] < trained["resnet18-groupnorm"]


def test_a_deep_network_with_frozen_statistics_stays_in_range():
    workload = make_workload(Setting("resnet101", "images-32", 1), torch.device("cpu"), 0)
    with torch.no_grad():
        out = workload.model(workload.inputs)
    assert torch.isfinite(out).all() and out.abs().max() < 1e3


def test_a_loss_is_the_mean_over_the_positions_of_its_own_example():
    torch.manual_seed(0)
    outputs, targets = torch.randn(3, 5, 7), torch.randint(7, (3, 5))
    alone = [nn.functional.cross_entropy(o, t) for o, t in zip(outputs, targets, strict=True)]
    torch.testing.assert_close(losses_of(outputs, targets), torch.stack(alone))


def test_the_target_of_a_continued_text_is_the_next_id():
    x, y = Tokens(length=6, vocabulary=1000, continued=True).draw(4)
    assert torch.equal(x[:, 1:], y[:, :-1])


def test_one_seed_is_one_workload():
    setting = Setting("mlp-2", "mnist", 4)
    first, same, other = (make_workload(setting, torch.device("cpu"), seed) for seed in (1, 1, 2))
    assert torch.equal(first.inputs, same.inputs) and not torch.equal(first.inputs, other.inputs)
    assert torch.equal(next(first.model.parameters()), next(same.model.parameters()))


def test_batches_are_epochs():
    workload = make_workload(Setting("mlp-2", "mnist", 4), torch.device("cpu"), 0)
    batches = workload.batches()
    for _ in range(2):
        epoch = torch.cat([next(batches)[0] for _ in range(len(workload.inputs) // 4)])
        assert torch.equal(epoch.flatten(1).sum(1).sort()[0], workload.inputs.flatten(1).sum(1).sort()[0])


@pytest.mark.parametrize(("model", "data"), [("mlp-3", "mnist"), ("cnn", "svhn"), ("cnn", "images-big")])
def test_unknown_names_are_refused(model, data):
    with pytest.raises(ConfigurationError, match="is not known"):
        make_workload(Setting(model, data, 2), torch.device("cpu"), 0)
