"""Models by name."""

from clipwise.recipes.small_cnn import small_cnn
from experiments.models.backprop_nets import backprop_cifar10, backprop_mnist
from experiments.models.bilstm import bilstm
from experiments.models.bn_lenet5 import bn_lenet5
from experiments.models.convnet import convnet
from experiments.models.convnet3 import convnet3
from experiments.models.convnet6 import convnet6
from experiments.models.lenet import lenet5, lenet_300_100
from experiments.models.mlp2 import mlp2
from experiments.models.normalized import PLACEMENTS
from experiments.models.norms import NORMS
from experiments.models.patches import patch_convnet6, patch_vgg
from experiments.models.registry import build, names
from experiments.models.resnet18 import resnet18
from experiments.models.shallow_vgg import shallow_vgg
from experiments.models.tutorial_cnn import tutorial_cnn
from experiments.models.vgg import light_vgg, vgg16

__all__ = [
    "NORMS",
    "PLACEMENTS",
    "backprop_cifar10",
    "backprop_mnist",
    "bilstm",
    "bn_lenet5",
    "build",
    "convnet",
    "convnet3",
    "convnet6",
    "lenet5",
    "lenet_300_100",
    "light_vgg",
    "mlp2",
    "names",
    "patch_convnet6",
    "patch_vgg",
    "resnet18",
    "shallow_vgg",
    "small_cnn",
    "tutorial_cnn",
    "vgg16",
]
