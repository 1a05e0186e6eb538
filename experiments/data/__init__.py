"""Real data sets by name."""

from clipwise.recipes.digits import digits
from experiments.data import tables
from experiments.data.columns import columns
from experiments.data.images import Look, images, look
from experiments.data.split import Split, placed, split
from experiments.data.tables import Table, cut, table
from experiments.data.texts import texts

__all__ = [
    "Look",
    "Split",
    "Table",
    "columns",
    "cut",
    "digits",
    "images",
    "look",
    "placed",
    "split",
    "table",
    "tables",
    "texts",
]
