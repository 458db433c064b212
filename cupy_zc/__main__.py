"""``python -m cupy_zc``: the same as ``cupy-zc``."""

from __future__ import annotations

from .cli import main

if __name__ == "__main__":
    main()
