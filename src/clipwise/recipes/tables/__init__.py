"""Tables: CSV and Parquet files, schemas, and their encoding as tensors."""

from clipwise.recipes.tables.encoder import TableEncoder
from clipwise.recipes.tables.schema import Schema, read_schema
from clipwise.recipes.tables.source import TableSource

__all__ = ["Schema", "TableEncoder", "TableSource", "read_schema"]
