"""Scenes of messages that tests of the mail kernel share."""

from __future__ import annotations

import numpy as np
from emulated_mail import Scene, content

__all__ = ["BOUNDARIES", "any_scene", "ring", "swap"]

#: Around a letter (120), a slot (128), all tracks (384), a full ring (768), and several rings.
BOUNDARIES = (
    0,
    1,
    15,
    16,
    17,
    61,
    111,
    112,
    113,
    119,
    120,
    121,
    127,
    128,
    129,
    257,
    383,
    384,
    385,
    767,
    768,
    769,
    4001,
)


def skew(rng: np.random.Generator) -> int:
    return int(rng.choice([0, 0, 1, 2, 4, 8, 15]))


def swap(rng: np.random.Generator, one: int, other: int) -> Scene:
    """Two ranks that send_recv with each other."""
    scene = Scene(2)
    scene.send_recv(0, 1, content(rng, one), other, (skew(rng), skew(rng)))
    scene.send_recv(1, 0, content(rng, other), one, (skew(rng), skew(rng)))
    return scene


def ring(rng: np.random.Generator, size: int, sizes: list[int]) -> Scene:
    """Every rank sends to the next one, and receives from the one before."""
    scene = Scene(size)
    for nbytes in sizes:
        for rank in range(size):
            scene.send(rank, (rank + 1) % size, content(rng, nbytes), skew(rng))
            scene.recv(rank, rank - 1 if rank else size - 1, nbytes, skew(rng))
    return scene


def any_scene(rng: np.random.Generator, size: int, events: int, largest: int = 2000) -> Scene:
    """Messages and exchanges between ranks at random; each side of an exchange of either kind.

    All ranks meet the events in the same order, so no two of them wait for each other for ever.
    """
    scene = Scene(
        size,
        threads=int(rng.choice([8, 32, 64])),
        letters=int(rng.choice([1, 2, 4])),
        slots=int(rng.choice([1, 2, 4])),
        tracks=int(rng.integers(1, 4)),
        letter=int(rng.choice([0, 120, 600])),
        slot=int(rng.choice([128, 256])),
    )
    for _ in range(events):
        one, other = (int(rank) for rank in rng.choice(size, 2, replace=False))
        there, back = (
            int(x) if rng.integers(2) else int(x) % 80 for x in rng.integers(0, largest, 2)
        )
        if rng.integers(2):
            tracks = int(rng.integers(scene.tracks + 1))
            scene.send(one, other, content(rng, there), skew(rng), tracks)
            scene.recv(other, one, there, skew(rng))
            continue
        for me, peer, mine, theirs in ((one, other, there, back), (other, one, back, there)):
            data = content(rng, mine)
            if rng.integers(2):
                scene.send_recv(me, peer, data, theirs, (skew(rng), skew(rng)))
            else:
                scene.send(me, peer, data, skew(rng), int(rng.integers(scene.tracks + 1)))
                scene.recv(me, peer, theirs, skew(rng))
    return scene
