"""Pools and processes: sharing, forking, and leaving quietly."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import cupy
import numpy as np
import pytest

import cupy_zc
from cupy_zc.driver.host import HostDriver

#: Python 3.12 warns of forks of processes that have threads, which is what some tests are about.
WARNINGS = ("-W", "error", "-W", "ignore:This process:DeprecationWarning")


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *WARNINGS, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )


def test_another_process_reads_the_array_through_its_descriptor(allocator):
    driver = HostDriver()
    pool = cupy_zc.MemoryPool(driver=driver)
    allocator(pool)
    array = cupy.empty(1000, dtype="i8")
    cupy_zc.copyto(array, np.arange(1000))
    segment = array.data.mem.segment
    descriptor = driver.export_segment(segment.handle)
    try:
        offset = array.data.ptr - segment.address
        result = subprocess.run(
            [
                sys.executable,
                "-c",
                "import mmap, sys, numpy as np\n"
                "fd, size, offset = map(int, sys.argv[1:])\n"
                "memory = mmap.mmap(fd, size)\n"
                "print(np.frombuffer(memory, 'i8', 1000, offset).sum())",
                str(descriptor),
                str(segment.size),
                str(offset),
            ],
            pass_fds=[descriptor],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    finally:
        os.close(descriptor)
    assert int(result.stdout) == 499500


def test_a_forked_child_gets_memory_of_its_own():
    """Ends: parent and child handing out, and writing, the same shared pages."""
    result = run(
        """
        import gc, os, cupy, cupy_zc, numpy as np
        pool = cupy_zc.install(cupy_zc.MemoryPool(driver="host"))
        parents = cupy.empty(100, dtype="i4")
        cupy_zc.copyto(parents, 7)
        spare = cupy.empty(1000)
        del spare
        child = os.fork()
        if child == 0:
            assert pool.total_bytes() == 0
            mine = [cupy.empty(1000) for _ in range(10)]
            for array in mine:
                cupy_zc.copyto(array, 3)
            assert (cupy_zc.asnumpy(parents) == 7).all()
            del parents
            gc.collect()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert status == 0
        assert (cupy_zc.asnumpy(parents) == 7).all()
        spare = cupy.empty(1000)
        assert not (cupy_zc.asnumpy(spare) == 3).any()
        print(pool.used_bytes())
        """
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert int(result.stdout) == 512 + 8192


def test_threads_may_fork_at_once():
    """Ends: two forks sharing one list of what they hold, and a lock that stays locked."""
    result = run(
        """
        import os, sys, threading, cupy, cupy_zc
        sys.setswitchinterval(1e-6)
        pool = cupy_zc.install(cupy_zc.MemoryPool(driver="host"))
        cupy.empty(10)
        def work():
            for _ in range(25):
                child = os.fork()
                if child == 0:
                    cupy.empty(10)
                    os._exit(0)
                _, status = os.waitpid(child, 0)
                assert status == 0
        threads = [threading.Thread(target=work) for _ in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        pool.free_all_blocks()
        print("done")
        """
    )
    assert result.stdout == "done\n"
    assert "Exception ignored" not in result.stderr


def test_a_fork_that_gets_no_turn_is_told_and_takes_no_lock_of_another():
    """Ends: a fork that waited in vain releasing the locks of the thread it had waited for."""
    result = run(
        """
        import os, threading, cupy, cupy_zc
        from cupy_zc.driver import host, host_memory
        host_memory.FORK_DEADLINE = 0.1
        pool = cupy_zc.install(cupy_zc.MemoryPool(driver="host"))
        cupy.empty(10)
        host._fork.acquire()  # as another thread does while it forks
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        print(host._fork.locked())
        host._fork.release()
        pool.free_all_blocks()
        """
    )
    assert (result.returncode, result.stdout) == (0, "True\n")
    assert "cannot use it" in result.stderr


def test_a_fork_that_gets_one_lock_of_a_driver_alone_lets_go_of_it():
    """Ends: a driver that is stuck for ever after a fork in the middle of a long call."""
    result = run(
        """
        import os, threading, cupy, cupy_zc
        from cupy_zc.driver import host, host_memory
        host_memory.FORK_DEADLINE = 0.1
        pool = cupy_zc.install(cupy_zc.MemoryPool(driver="host"))
        cupy.empty(10)
        changed = pool.driver._streams.changed
        held, go = threading.Event(), threading.Event()
        def hold():
            with changed:
                held.set()
                go.wait(30)
        thread = threading.Thread(target=hold, daemon=True)
        thread.start()
        held.wait(30)
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        go.set()
        thread.join()
        free = threading.Thread(target=lambda: print(pool.driver._lock.acquire(timeout=5)))
        free.start()
        free.join()
        print(host._fork.locked())
        """
    )
    assert (result.returncode, result.stdout) == (0, "True\nFalse\n")
    assert "cannot use it" in result.stderr


def test_work_that_a_thread_of_the_parent_runs_does_not_hold_up_the_child():
    result = run(
        """
        import os, threading, cupy, cupy_zc
        pool = cupy_zc.install(cupy_zc.MemoryPool(driver="host"))
        stream = pool.driver.make_stream()
        running, go_on = threading.Event(), threading.Event()
        work = lambda: (running.set(), go_on.wait(30))
        thread = threading.Thread(target=stream.enqueue, args=(work,))
        thread.start()
        running.wait(30)
        child = os.fork()
        if child == 0:
            cupy.empty(10)
            pool.free_all_blocks()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        go_on.set()
        thread.join()
        print(status)
        """,
        CUPY_ZC_TIMEOUT="5",
    )
    assert result.stdout == "0\n"


@pytest.mark.parametrize("holder", ["global", "cycle", "hook", "graph"])
def test_leaving_with_live_arrays_is_silent(holder):
    result = run(
        f"""
        import atexit, cupy, cupy_zc
        from cupy_zc.driver.host import HostDriver
        driver = HostDriver()
        pool = cupy_zc.install(cupy_zc.MemoryPool(driver=driver))
        array = cupy.empty(1000)
        class Cycle: pass
        if {holder!r} == "cycle":
            cycle = Cycle(); cycle.me = cycle; cycle.array = array
        if {holder!r} == "hook":
            hook = cupy.cuda.MemoryHook(); hook.__enter__()
        if {holder!r} == "graph":
            stream = driver.make_stream()
            with stream:
                stream.begin_capture()
                temporary = cupy.empty(10)
                graph = stream.end_capture()
        """
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_fifty_exits_at_random_moments_are_silent():
    result = run(
        """
        import os, random, sys, cupy, cupy_zc
        for seed in range(50):
            if os.fork() == 0:
                random.seed(seed)
                pool = cupy_zc.install(cupy_zc.MemoryPool(driver="host"))
                arrays = [cupy.empty(random.randrange(10_000)) for _ in range(random.randrange(20))]
                keep = arrays[: len(arrays) // 2]
                sys.exit(0)
            _, status = os.wait()
            assert status == 0
        """
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_no_gpu_is_not_an_error_and_is_said_once():
    result = run(
        """
        import logging
        logging.basicConfig(format="%(name)s %(levelname)s %(message)s")
        import cupy_zc
        for _ in range(3):
            print(cupy_zc.MemoryPool().driver.name)
        """,
        CUDA_VISIBLE_DEVICES="",
        CUPY_ZC_DRIVER="auto",
    )
    assert result.stdout == "host\n" * 3
    assert result.stderr.count("host driver") == 1
    assert "cupy_zc WARNING" in result.stderr


@pytest.mark.parametrize("launcher", ["MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK"])
def test_of_the_ranks_on_a_machine_one_says_that_there_is_no_gpu(launcher):
    code = "import cupy_zc; print(cupy_zc.MemoryPool().driver.name)"
    said = [
        run(code, CUDA_VISIBLE_DEVICES="", CUPY_ZC_DRIVER="auto", **{launcher: str(rank)}).stderr
        for rank in range(2)
    ]
    assert [text.count("host driver") for text in said] == [1, 0]


def test_asking_for_cuda_without_a_gpu_is_an_error_that_says_why():
    result = run(
        """
        import cupy_zc
        try:
            cupy_zc.MemoryPool(driver="cuda")
        except cupy_zc.DriverError as error:
            print(error)
        """,
        CUDA_VISIBLE_DEVICES="",
    )
    assert "cuInit" in result.stdout
