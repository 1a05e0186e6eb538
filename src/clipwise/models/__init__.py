"""Models by name."""

from clipwise.models.backprop_nets import backprop_cifar10, backprop_mnist
from clipwise.models.bn_lenet5 import bn_lenet5
from clipwise.models.convnet import convnet
from clipwise.models.convnet3 import convnet3
from clipwise.models.convnet6 import convnet6
from clipwise.models.mlp2 import mlp2
from clipwise.models.norms import NORMS
from clipwise.models.registry import build, names
from clipwise.models.resnet18 import resnet18
from clipwise.models.shallow_vgg import shallow_vgg
from clipwise.models.small_cnn import small_cnn

__all__ = [
    "NORMS",
    "backprop_cifar10",
    "backprop_mnist",
    "bn_lenet5",
    "build",
    "convnet",
    "convnet3",
    "convnet6",
    "mlp2",
    "names",
    "resnet18",
    "shallow_vgg",
    "small_cnn",
]
