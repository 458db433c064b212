"""How commands say things: exit codes, a console for people, JSON for programs."""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Callable
from typing import IO, Any, TypeVar

import click
from rich.console import Console

__all__ = ["CannotError", "Exit", "console", "json_option", "print_json"]

_F = TypeVar("_F", bound=Callable[..., Any])

#: Columns where there is no terminal to ask: lines are for files then, and stay whole.
_WIDTH = 160


class Exit(enum.IntEnum):
    """Exit codes of every command."""

    OK = 0
    #: The command did its work, and what it found is not well.
    FINDING = 1
    USAGE = 2
    #: The command could not do its work.
    CANNOT = 3

    def __str__(self) -> str:
        return str(self.value)


class CannotError(click.ClickException):
    """Ends a command with a message on stderr and :attr:`Exit.CANNOT`."""

    exit_code = Exit.CANNOT.value


def console(file: IO[str] | None = None) -> Console:
    """A console on standard output, or on ``file``. Plain text where that is no terminal."""
    stream = sys.stdout if file is None else file
    width = None if stream.isatty() else _WIDTH
    return Console(file=stream, width=width, highlight=False, emoji=False, markup=False)


def json_option(command: _F) -> _F:
    """Give a command the flag ``--json``, as the argument ``as_json``."""
    text = "Print one JSON value, and nothing else, on standard output."
    return click.option("--json", "as_json", is_flag=True, help=text)(command)


def print_json(value: Any) -> None:
    """Print a value for programs."""
    click.echo(json.dumps(value, indent=2))
