from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import group_workers as workers
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_zc import config
from cupy_zc.errors import (
    MismatchError,
)
from cupy_zc.group import (
    NodeIdentity,
    arrange,
    discover,
    identity,
    in_process,
)

ROOT = Path(__file__).parents[1]


IDENTITY = st.builds(
    NodeIdentity,
    machine=st.sampled_from([bytes([number]) * 16 for number in range(5)]),
)


@given(st.lists(IDENTITY, min_size=1, max_size=12), st.integers(0, 4), st.data())
def test_ranks_share_a_node_exactly_when_they_are_the_same_machine(
    identities: list[NodeIdentity], node_size: int, data: st.DataObject
) -> None:
    identities = [dataclasses.replace(item, node_size=node_size) for item in identities]
    rank = data.draw(st.integers(0, len(identities) - 1))
    topology = arrange(identities, rank)
    assert topology.size == len(identities)
    assert sorted(r for node in topology.nodes for r in node) == list(range(topology.size))
    assert topology.nodes[topology.node] == topology.node_ranks
    assert topology.node_ranks[topology.local_rank] == rank
    assert topology.local_size == len(topology.node_ranks)
    assert [node[0] for node in topology.nodes] == sorted(node[0] for node in topology.nodes)
    for node in topology.nodes:
        assert list(node) == sorted(node)
        assert len({identities[r] for r in node}) == 1
        assert not node_size or len(node) <= node_size
    if not node_size:
        assert len(topology.nodes) == len(set(identities))
    for other in range(topology.size):
        assert arrange(identities, other).node_of == topology.node_of


@given(IDENTITY, st.integers(0, 1 << 40))
@settings(max_examples=20)
def test_identities_arrive_as_they_were_sent(given_identity: NodeIdentity, node_size: int) -> None:
    given_identity = dataclasses.replace(given_identity, node_size=node_size)
    assert NodeIdentity.from_bytes(given_identity.to_bytes()) == given_identity


def test_processes_of_one_machine_say_the_same() -> None:
    here = NodeIdentity.here()
    code = (
        "from cupy_zc.group import NodeIdentity; import sys;"
        "sys.stdout.buffer.write(NodeIdentity.here().to_bytes())"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True, timeout=30
    )
    assert NodeIdentity.from_bytes(run.stdout) == here


def test_a_boot_and_each_namespace_make_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert identity._boot_id() == boot_id
    real = identity._namespace
    assert all(real(name) for name in ("ipc", "net", "pid"))
    machines = [NodeIdentity.here().machine]
    for other in ("ipc", "net", "pid"):
        monkeypatch.setattr(
            identity, "_namespace", lambda name, other=other: real(name) + (name == other)
        )
        machines.append(NodeIdentity.here().machine)
    monkeypatch.setattr(identity, "_namespace", real)
    monkeypatch.setattr(identity, "_boot_id", lambda: boot_id[::-1])
    machines.append(NodeIdentity.here().machine)
    assert len(set(machines)) == 5


def test_a_process_that_cannot_tell_where_it_is_shares_with_nobody(tmp_path: Path) -> None:
    nowhere = identity._boot_id(tmp_path / "absent")
    assert nowhere.startswith("unknown-")
    assert nowhere != identity._boot_id(tmp_path / "absent too")
    assert identity._namespace("absent") == 0


def test_pretend_nodes_split_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPY_ZC_NODE_SIZE", "2")
    config.settings.cache_clear()
    try:
        group = in_process(5)
        topologies = workers.all_fine(workers.in_threads(5, lambda r: discover(group[r])))
    finally:
        monkeypatch.undo()
        config.settings.cache_clear()
    assert topologies[3].nodes == ((0, 1), (2, 3), (4,))
    assert topologies[3].node_ranks == (2, 3)


def test_different_node_sizes_are_a_mismatch() -> None:
    with pytest.raises(MismatchError, match=r"rank 0 has 0; rank 1 has 2"):
        arrange([NodeIdentity(b"a"), NodeIdentity(b"a", 2)], 0)
