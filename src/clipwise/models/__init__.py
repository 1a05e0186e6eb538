"""Models by name."""

from clipwise.models.backprop_nets import backprop_cifar10, backprop_mnist
from clipwise.models.bilstm import bilstm
from clipwise.models.bn_lenet5 import bn_lenet5
from clipwise.models.convnet import convnet
from clipwise.models.convnet3 import convnet3
from clipwise.models.convnet6 import convnet6
from clipwise.models.lenet import lenet5, lenet_300_100
from clipwise.models.mlp2 import mlp2
from clipwise.models.normalized import PLACEMENTS
from clipwise.models.norms import NORMS
from clipwise.models.patches import patch_convnet6, patch_vgg
from clipwise.models.registry import build, names
from clipwise.models.resnet18 import resnet18
from clipwise.models.shallow_vgg import shallow_vgg
from clipwise.models.small_cnn import small_cnn
from clipwise.models.tutorial_cnn import tutorial_cnn
from clipwise.models.vgg import light_vgg, vgg16

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
