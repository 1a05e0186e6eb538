"""Real data sets by name."""

from clipwise.data import tables
from clipwise.data.columns import columns
from clipwise.data.digits import digits
from clipwise.data.images import Look, images, look
from clipwise.data.split import Split, split
from clipwise.data.tables import Table, cut, table
from clipwise.data.texts import texts

__all__ = [
    "Look",
    "Split",
    "Table",
    "columns",
    "cut",
    "digits",
    "images",
    "look",
    "split",
    "table",
    "tables",
    "texts",
]
