"""The command line: `clipwise COMMAND`."""

from __future__ import annotations

import errno
import warnings
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from clipwise import __version__
from clipwise.cli.audit import audit
from clipwise.cli.check import check
from clipwise.cli.demo import demo
from clipwise.cli.epsilon import epsilon
from clipwise.cli.evaluate import evaluate
from clipwise.cli.export import export
from clipwise.cli.noise import noise
from clipwise.cli.output import remark, say
from clipwise.cli.predict import predict
from clipwise.cli.report import report
from clipwise.cli.schema import schema
from clipwise.cli.statement import statement
from clipwise.cli.tradeoff import tradeoff
from clipwise.cli.train import train
from clipwise.cli.tune import tune
from clipwise.errors import ClipwiseError

# Reasons of the machine, not of clipwise, for which a file cannot be written.
_OF_THE_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)


class _Commands(TyperGroup):
    """Prints errors raised by clipwise as one line, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: remark(f"warning: {message}", "yellow")
            try:
                return super().invoke(ctx)
            except ClipwiseError as error:
                remark(f"error: {error}", "red")
                raise typer.Exit(2) from error
            except OSError as error:
                if error.errno not in _OF_THE_MACHINE:
                    raise
                remark(f"error: {error.filename or 'a file'} cannot be written: {error.strerror}.", "red")
                raise typer.Exit(2) from error


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,  # locals may be records
)


def _version(wanted: bool) -> None:
    if wanted:
        say(f"clipwise {__version__}")
        raise typer.Exit()


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train PyTorch models under differential privacy.

    Begin with `clipwise demo`, or with `clipwise train` on your own data. Each command has an example in its own
    --help.
    """


for command in (
    *(demo, train, predict, evaluate, export, report, schema),
    *(statement, epsilon, noise, tradeoff, check, audit, tune),
):
    app.command()(command)
