"""The frame of the command line: the commands, what is common to them, and how they fail."""

from __future__ import annotations

import errno
import importlib
import logging
from typing import Any

import click

from .. import __version__
from ..errors import Error
from .output import CannotError, Exit

__all__ = ["COMMANDS", "cli", "main"]

#: By name, the module that defines it; in the order of the help.
COMMANDS = {
    "doctor": "doctor",
    "bench": "bench",
    "demo": "demo",
    "selftest": "selftest",
    "view": "view",
}

_EPILOG = f"""\b
Exit codes, of every command:
  {Exit.OK}  all is well
  {Exit.FINDING}  the command did its work, and what it found is not well
  {Exit.USAGE}  wrong usage
  {Exit.CANNOT}  the command could not do its work

Colours are used on a terminal only, and never where NO_COLOR is set."""


class _Commands(click.Group):
    """Imports a command when it is used; errors of the package end it with a message."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        module = COMMANDS.get(cmd_name)
        if module is None:
            return None
        command: click.Command = importlib.import_module(f".{module}", __package__).command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader of a pipe has had enough; click knows
                raise
            raise CannotError(str(error)) from error
        except Error as error:
            raise CannotError(str(error)) from error


@click.group(
    cls=_Commands, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(__version__, message="cupy-zc %(version)s")
@click.option("-v", "--verbose", is_flag=True, help="Show the log of the package, on stderr.")
def cli(*, verbose: bool) -> None:
    """Zero-copy memory and collectives for CuPy: look at them, try them, measure them."""
    if verbose:
        logging.basicConfig(format="%(name)s %(levelname)s: %(message)s")
        logging.getLogger("cupy_zc").setLevel(logging.DEBUG)


def main() -> None:
    """Run the command line of this process, and exit."""
    cli(prog_name="cupy-zc")
