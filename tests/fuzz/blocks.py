"""All kinds of blocks of random models, by name in `KINDS`."""

from tests.fuzz import layers, moved, parameters
from tests.fuzz.block import KINDS, Block, Shape, any_block

__all__ = ["KINDS", "Block", "Shape", "any_block", "layers", "moved", "parameters"]
