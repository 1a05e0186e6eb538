"""`python -m clipwise`: the command line where the script `clipwise` is not on the path."""

from clipwise.cli.app import app

app(prog_name="clipwise")
