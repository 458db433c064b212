"""The allocator that every rank runs: same offsets, no overlap, and everything comes back."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_zc import MismatchError
from cupy_zc.registration.allocator import SymmetricAllocator

SEGMENT = 32


def check(allocator, segments):
    """Blocks and holes tile the segments; holes are merged."""
    holes = allocator.holes()
    pieces = [(b.offset, b.size, b.segment) for b in allocator.blocks()]
    pieces += [(at, size, max(s for s in segments if s <= at)) for at, size in holes]
    pieces.sort()
    for segment, size in segments.items():
        at = segment
        for offset, length, home in pieces:
            if home == segment:
                assert offset == at
                assert length > 0
                at += length
        assert at == segment + size
    for (a, size), (b, _) in itertools.pairwise(holes):
        assert a + size < b or b in segments


class Node:
    """One rank: a replica, the arrays it holds, and the drops nobody knows of yet."""

    def __init__(self, ranks):
        self.allocator = SymmetricAllocator(ranks)
        self.held = {}
        self.news = []


@given(st.data(), st.integers(1, 4))
def test_every_rank_is_given_the_same_offsets_whoever_drops_what_and_when(data, n):
    ranks = range(n)
    nodes = [Node(ranks) for _ in ranks]
    segments = {}
    top = 0
    for _ in range(data.draw(st.integers(1, 25))):
        for node in nodes:  # each drops what it likes, in any order, and tells late
            for number in data.draw(st.lists(st.sampled_from(sorted(node.held) or [0]))):
                if node.held.pop(number, None) is not None:
                    node.news.append(number)
        size = data.draw(st.integers(1, SEGMENT + 8))
        tell = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
        said = [list(node.news) if told else [] for node, told in zip(nodes, tell, strict=True)]
        given_ = []
        for node, news in zip(nodes, said, strict=True):
            del node.news[: len(news)]
            for rank, numbers in enumerate(said):
                node.allocator.drop(rank, numbers)
            block = node.allocator.allocate(size)
            if block is None:
                node.allocator.grow(top, max(size, SEGMENT))
                segments[top] = max(size, SEGMENT)
                block = node.allocator.allocate(size)
            node.held[block.number] = block
            given_.append((block.number, block.offset, block.size, block.segment))
        assert len(set(given_)) == 1
        top = max(at + length for at, length in segments.items())
        for node in nodes:
            check(node.allocator, segments)
            mine = sorted((block.offset, block.size) for block in node.held.values())
            assert all(a + length <= b for (a, length), (b, _) in itertools.pairwise(mine))
            assert {b.number for b in node.allocator.blocks()} >= set(node.held)
    for rank, dropper in enumerate(nodes):
        numbers = [*dropper.news, *dropper.held]
        for node in nodes:
            node.allocator.drop(rank, numbers)
    for node in nodes:
        assert node.allocator.blocks() == ()
        assert node.allocator.holes() == sorted(segments.items())


def test_the_lowest_hole_that_fits_is_taken():
    allocator = SymmetricAllocator([0])
    assert allocator.allocate(1) is None
    allocator.grow(0, 10)
    a, b, _ = (allocator.allocate(size) for size in (2, 3, 2))
    allocator.drop(0, [a.number, b.number])
    assert allocator.holes() == [(0, 5), (7, 3)]
    assert allocator.allocate(3).offset == 0
    assert allocator.allocate(3).offset == 7
    assert allocator.allocate(3) is None


def test_holes_of_two_segments_are_never_joined():
    allocator = SymmetricAllocator([0])
    allocator.grow(10, 10)
    allocator.grow(0, 10)
    blocks = [allocator.allocate(10), allocator.allocate(10)]
    assert [block.offset for block in blocks] == [0, 10]
    allocator.drop(0, [block.number for block in blocks])
    assert allocator.holes() == [(0, 10), (10, 10)]
    assert allocator.allocate(11) is None


@pytest.mark.parametrize("again", [0, 1])
def test_a_block_that_is_not_the_ranks_to_drop_is_a_mismatch(again):
    allocator = SymmetricAllocator([0, 1])
    allocator.grow(0, 10)
    allocator.allocate(10)
    allocator.drop(0, [0])
    with pytest.raises(MismatchError, match=f"rank 0 dropped symmetric block {again}"):
        allocator.drop(0, [again])
    allocator.drop(1, [0])
    assert allocator.holes() == [(0, 10)]
