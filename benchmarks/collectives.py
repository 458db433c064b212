"""``cupy-zc bench`` as this project's figures are made: graphs, all engines, up to 1 GiB.

    export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
    python benchmarks/collectives.py -b 1K -e 1G -f 4 --json benchmarks/results/collectives.jsonl

A figure is the median of 7 replays of a CUDA graph that holds 20 calls (4 above 16 MiB), out of
place, the slowest rank counting. At 1 KiB there is also the cost of an eager call in Python thread
time. ``--in-place`` and every other flag of ``cupy-zc bench`` work here too; ``--driver host``
needs no GPU.

Unlike ``cupy-zc bench``, which switches multicast off itself, it does not start (exit code 2)
where the environment has not done so: what else runs from the same shell is then guarded too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from cupy_zc.cli.app import cli
from cupy_zc.cli.bench.api import COLLECTIVES
from cupy_zc.cli.bench.engines import ENGINES
from cupy_zc.cli.bench.guard import unguarded
from cupy_zc.cli.output import Exit

#: Flags that come before those of the caller, who has the last word.
DEFAULTS = (
    *("--driver", "cuda", "-e", "1G", "--graph", "--no-in-place", "--host-cost"),
    *("--engines", ",".join(ENGINES), "--collective", ",".join(COLLECTIVES)),
)


def main(arguments: Sequence[str]) -> None:
    missing = unguarded(os.environ)
    if missing:
        print(
            f"collectives.py starts only where multicast is switched off for every library: "
            f"set {' '.join(missing)} in its environment",
            file=sys.stderr,
        )
        sys.exit(Exit.USAGE)
    cli(["bench", *DEFAULTS, *arguments], prog_name="collectives.py")


if __name__ == "__main__":
    main(sys.argv[1:])
