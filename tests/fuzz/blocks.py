"""All kinds of blocks that a model may be made of, by name in `KINDS`."""

from tests.fuzz import layers, moved, parameters
from tests.fuzz.block import KINDS, Block, Shape, any_block

__all__ = ["KINDS", "Block", "Shape", "any_block", "layers", "moved", "parameters"]
