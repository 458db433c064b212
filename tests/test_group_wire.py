from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_zc.group import (
    wire,
)


@given(
    st.lists(st.tuples(st.sampled_from(wire.Kind), st.binary(max_size=300)), max_size=8),
    st.lists(st.integers(1, 50), min_size=1),
)
def test_frames_are_read_however_the_stream_is_cut(
    frames: list[tuple[wire.Kind, bytes]], cuts: list[int]
) -> None:
    stream = b"".join(wire.frame(*item) for item in frames)
    reader = wire.FrameReader(300)
    read, turn = [], 0
    while stream:
        cut = cuts[turn % len(cuts)]
        read += reader.feed(stream[:cut])
        stream, turn = stream[cut:], turn + 1
    assert read == frames


@given(st.lists(st.binary(max_size=100)))
def test_items_are_unpacked_as_packed(items: list[bytes]) -> None:
    assert wire.unpack_items(wire.pack_items(items)) == items


@given(st.lists(st.binary(max_size=20), min_size=1), st.data())
def test_items_cut_short_are_refused(items: list[bytes], data: st.DataObject) -> None:
    packed = wire.pack_items(items)
    ends = {len(wire.pack_items(items[:n])) for n in range(len(items) + 1)}
    cut = data.draw(st.integers(0, len(packed)).filter(lambda at: at not in ends))
    with pytest.raises(wire.WireError):
        wire.unpack_items(packed[:cut])


@given(st.sets(st.integers(0, 1 << 20)))
def test_ranks_are_unpacked_as_packed(ranks: set[int]) -> None:
    assert wire.unpack_ranks(wire.pack_ranks(ranks)) == sorted(ranks)
