"""Adapters for training frameworks. Each module needs its framework, which an extra of the same name installs."""
