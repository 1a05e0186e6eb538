import pytest
import torch
from torch import nn

from benchmarks.networks import build, names, train_only
from benchmarks.networks.convolutional import Residual
from benchmarks.shapes import Tokens, shape_of
from benchmarks.workload import Setting, losses_of, make_workload
from clipwise.errors import ConfigurationError

DATA = {
    "transformer": "imdb",
    "gpt2-small": "text",
    "gpt2-small-untied": "text",
    "wrn-16-4": "cifar10",
    "gpt2-mini": "text-128",
    "vit-b16": "images-224",
    "vit-tiny": "images-32",
    "resnet18-groupnorm-32": "cifar10",
    "vgg11-groupnorm-32": "cifar10",
}


def data_of(name):
    return DATA.get(name, "images-64" if name.startswith(("resnet", "vgg")) else "mnist")


@pytest.mark.parametrize("name", names())
def test_every_network_gives_one_output_per_example(name):
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


@pytest.mark.parametrize(("name", "layers"), [("resnet18-groupnorm-32", 18), ("vgg11-groupnorm-32", 9)])
def test_the_form_for_small_images_has_as_many_convolutions_and_one_layer_for_a_head(name, layers):
    with torch.device("meta"):
        model = build(name, shape_of("cifar10"))
        first = model[0](torch.empty(2, 3, 32, 32))
    weighted = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    shortcuts = [b for b in model if isinstance(b, Residual) and not isinstance(b.shortcut, nn.Identity)]
    assert len(weighted) - len(shortcuts) == layers
    assert first.shape[-2:] == (32, 32)


@pytest.mark.parametrize("width", [1024, 4096])
def test_an_even_mlp_has_four_hidden_layers_of_its_width(width):
    with torch.device("meta"):
        model = build(f"mlp-4x{width}", shape_of("mnist"))
    assert [m.out_features for m in model if isinstance(m, nn.Linear)] == [width] * 4 + [10]


# ------------------------------------------------------------- few parameters


def trained(model):
    return {name for name, p in model.named_parameters() if p.requires_grad}


def test_only_what_is_named_is_trained():
    with torch.device("meta"):
        models = {
            what: train_only(build("vit-tiny", shape_of("images-32")), what)
            for what in ("all", "biases", "lora", "head")
        }
    every = {name for name, _ in models["all"].named_parameters()}
    assert trained(models["all"]) == every
    assert trained(models["biases"]) == {name for name in every if name.endswith("bias")}
    assert trained(models["head"]) == {"head.weight", "head.bias"}
    # Two layers in each of twelve blocks, with two matrices each.
    assert len(trained(models["lora"])) == 12 * 2 * 2
    assert all(name.endswith(("down", "up")) for name in trained(models["lora"]))


def test_a_low_rank_addition_changes_nothing_at_first_and_then_what_its_formula_says():
    torch.manual_seed(0)
    shape = shape_of("images-32")
    x, _ = shape.draw(2)
    model = build("vit-tiny", shape)
    before = model(x)
    train_only(model, "lora")
    assert torch.equal(model(x), before)
    layer = model.blocks[0].attention.query
    nn.init.normal_(layer.up)
    weight = layer.frozen.weight + layer.up @ layer.down * layer.scale
    inputs = torch.randn(3, weight.shape[1])
    expected = nn.functional.linear(inputs, weight, layer.frozen.bias)
    torch.testing.assert_close(layer(inputs), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "what"), [("mlp-2", "wheels"), ("mlp-2", "lora"), ("gpt2-mini", "head")])
def test_nothing_to_train_is_refused(name, what):
    with torch.device("meta"):
        model = build(name, shape_of(data_of(name)))
    with pytest.raises(ConfigurationError, match=f"trained='{what}'"):
        train_only(model, what)


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


def test_channels_last_holds_for_images_and_weights():
    setting = Setting("cnn", "cifar10", 2, channels_last=True)
    workload = make_workload(setting, torch.device("cpu"), 0)
    batch, _ = next(workload.batches())
    for tensor in (batch, workload.model[0].weight):
        assert tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def test_batches_are_epochs():
    workload = make_workload(Setting("mlp-2", "mnist", 4), torch.device("cpu"), 0)
    batches = workload.batches()
    for _ in range(2):
        epoch = torch.cat([next(batches)[0] for _ in range(len(workload.inputs) // 4)])
        assert torch.equal(epoch.flatten(1).sum(1).sort()[0], workload.inputs.flatten(1).sum(1).sort()[0])


@pytest.mark.parametrize(
    ("model", "data"), [("mlp-3", "mnist"), ("cnn", "svhn"), ("cnn", "images-big"), ("gpt2-mini", "text-long")]
)
def test_unknown_names_are_refused(model, data):
    with pytest.raises(ConfigurationError, match="is not known"):
        make_workload(Setting(model, data, 2), torch.device("cpu"), 0)
