"""``cupy-zc demo``: run one of the examples."""

from __future__ import annotations

import subprocess

import click

from .examples import EXAMPLES, facts, run
from .output import CannotError, Exit, json_option, print_json

__all__ = ["command"]

_NAMES = "\n".join(f"  {name:<8}  {example.title}" for name, example in EXAMPLES.items())


@click.command(
    "demo",
    context_settings={"ignore_unknown_options": True},
    help=f"""Run an example, with GPUs or without: {", ".join(EXAMPLES)}.

\b
{_NAMES}

What follows the name goes to the example: `cupy-zc demo digits --steps 50`. Exit code 1 where its
result is wrong.""",
)
@click.option("-n", "ranks", type=click.IntRange(1), help="Ranks, where it has several (2 or 4).")
@json_option
@click.argument("name", type=click.Choice(list(EXAMPLES)), default="digits")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(
    ctx: click.Context, name: str, arguments: tuple[str, ...], ranks: int | None, *, as_json: bool
) -> None:
    """See the help text above."""
    example = EXAMPLES[name]
    if ranks is not None and example.ranks == 1:
        raise click.UsageError(f"-n {ranks}: {name} is one process")
    words = example.command(ranks or example.ranks, arguments)
    if not as_json:
        ctx.exit(_exit(subprocess.run(words, check=False).returncode))
    done = run(words)
    print_json({"example": name, "returncode": done.returncode, "facts": facts(done.stdout)})
    if done.returncode:
        click.echo(done.stderr, err=True, nl=False)
    ctx.exit(_exit(done.returncode))


def _exit(code: int) -> int:
    """Our exit code for that of an example, which has the same meanings as far as it goes."""
    known = (Exit.OK, Exit.FINDING, Exit.USAGE)
    if code in known:
        return code
    raise CannotError(f"the example ended with exit code {code}")
