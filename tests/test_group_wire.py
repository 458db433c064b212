from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_zc.group import (
    wire,
)
from cupy_zc.group.bootstrap import Offer

OFFER = st.builds(Offer, st.sampled_from([b"", b"vote", b"barrier()"]), st.binary(max_size=3))


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


@given(st.lists(OFFER, min_size=1, max_size=20))
def test_what_ranks_give_is_unpacked_as_packed(offers: list[Offer]) -> None:
    assert [wire.unpack_offer(wire.pack_offer(offer)) for offer in offers] == offers
    packed = wire.pack_offers(offers)
    assert wire.unpack_offers(packed, len(offers)) == offers
    for size in (len(offers) - 1, len(offers) + 1):
        with pytest.raises(wire.WireError, match=f"is not of {size} ranks"):
            wire.unpack_offers(packed, size)


@given(st.integers(1, 5000))
def test_what_all_ranks_give_alike_is_as_long_as_that_of_one(size: int) -> None:
    alike = Offer(b"vote", b"yes")
    assert len(wire.pack_offers([alike] * size)) == len(wire.pack_offers([alike]))


@pytest.mark.parametrize(
    ("values", "runs"),
    [
        ([b"x"], [0, 1 << 31]),  # more ranks than memory has room for
        ([b"x"], [1, 2]),  # no such value
        ([], [0, 2]),
        ([b"x"], [0, 1]),
        ([b"x"], [0, 1, 0]),
    ],
)
def test_runs_that_are_not_of_the_ranks_are_refused(values: list[bytes], runs: list[int]) -> None:
    column = [wire.pack_items(values), b"".join(number.to_bytes(4, "big") for number in runs)]
    good = [wire.pack_items([b""]), bytes(7) + b"\2"]
    assert wire.unpack_offers(wire.pack_items([*good, *good]), 2) == [Offer(b"", b"")] * 2
    for parts in ([*good, *column], [*column, *good], good):
        with pytest.raises(wire.WireError):
            wire.unpack_offers(wire.pack_items(parts), 2)


@pytest.mark.parametrize("data", [b"", b"\0", b"\0\5call"])
def test_a_name_of_a_call_that_is_cut_short_is_refused(data: bytes) -> None:
    with pytest.raises(wire.WireError, match="cut short"):
        wire.unpack_offer(data)


@given(st.sets(st.integers(0, 1 << 20)))
def test_ranks_are_unpacked_as_packed(ranks: set[int]) -> None:
    assert wire.unpack_ranks(wire.pack_ranks(ranks)) == sorted(ranks)
