"""Rules, one file for each kind of operation. Importing this package registers those of every file in it."""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
