"""Models by name."""

from clipwise.models.bn_lenet5 import bn_lenet5
from clipwise.models.convnet import convnet
from clipwise.models.norms import NORMS
from clipwise.models.registry import build, names
from clipwise.models.resnet18 import resnet18
from clipwise.models.small_cnn import small_cnn

__all__ = ["NORMS", "bn_lenet5", "build", "convnet", "names", "resnet18", "small_cnn"]
