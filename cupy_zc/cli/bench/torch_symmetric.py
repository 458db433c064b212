"""PyTorch's symmetric memory: its one-shot and two-shot all-reduce.

The process group is only the way to the group's store; no NCCL communicator is made for it.
"""

from __future__ import annotations

import datetime as dt
import functools
from abc import abstractmethod
from typing import Any, ClassVar

from .api import Case, Context, Engine, Job, Unavailable

__all__ = ["OneShot", "TwoShot"]

_DTYPES = ("float32", "bfloat16")
_ALIGNMENT = 16
_LIMIT = dt.timedelta(seconds=60)


class _Symmetric(Engine):
    """What both have in common."""

    #: The operator of ``torch.ops.symm_mem``.
    operator: ClassVar[str]

    #: Rank 0's store, made once a process.
    store: ClassVar[Any] = None

    def __init__(self, context: Context, shared: Any) -> None:
        super().__init__(context, shared)
        import torch
        import torch.distributed as dist
        from torch.distributed import _symmetric_memory as symmetric

        self.torch = torch
        torch.cuda.set_device(context.rank)
        if not dist.is_initialized():  # once a process, whichever of the engines is first
            self._join(dist, shared)
        self._group = dist.group.WORLD.group_name
        device = torch.device("cuda", context.rank)
        self._stream = torch.cuda.ExternalStream(context.platform.stream.ptr, device=device)
        torch.cuda.set_stream(self._stream)
        size = context.capacity
        self.send = symmetric.empty(size, dtype=torch.uint8, device=device)
        symmetric.rendezvous(self.send, self._group)
        self.recv = torch.empty(size, dtype=torch.uint8, device=device)
        torch.cuda.synchronize()

    @classmethod
    def probe(cls, context: Context) -> Any:
        """Refuse without PyTorch, or where it is too old. Rank 0 gives the port of its store."""
        super().probe(context)
        try:
            import torch
            import torch.distributed as dist
            from torch.distributed import _symmetric_memory as symmetric
        except ImportError as error:
            raise Unavailable(f"PyTorch: {error}") from error
        if not hasattr(symmetric, "empty") or not hasattr(torch.ops.symm_mem, cls.operator):
            raise Unavailable(f"PyTorch {torch.__version__} has no symm_mem.{cls.operator}")
        if context.rank == 0 and _Symmetric.store is None:
            _Symmetric.store = dist.TCPStore("127.0.0.1", 0, context.ranks, True, _LIMIT, False)
        return _Symmetric.store.port if context.rank == 0 else None

    def _join(self, dist: Any, port: int) -> None:
        context, store = self.context, _Symmetric.store
        if store is None:
            store = dist.TCPStore("127.0.0.1", port, context.ranks, False, _LIMIT, False)
        dist.init_process_group(
            "nccl", store=store, rank=context.rank, world_size=context.ranks, timeout=_LIMIT
        )

    def refuses(self, case: Case) -> str:
        """Sums of two types, with parts that a 16-byte access can read."""
        if case.collective != "all_reduce" or case.op != "sum":
            return "only sums, and only all_reduce"
        if case.in_place:
            return "its calls have an output of their own"
        if case.dtype not in _DTYPES:
            return f"only {' and '.join(_DTYPES)}"
        if case.part * case.type.itemsize % _ALIGNMENT:
            return f"a rank's part is no multiple of {_ALIGNMENT} bytes"
        return ""

    def prepare(self, case: Case) -> Job:
        """Views of the two buffers, for PyTorch and for CuPy."""
        cupy = self.context.platform.xp
        kind = getattr(self.torch, case.dtype)
        tensors = [buffer[: case.nbytes].view(kind) for buffer in (self.send, self.recv)]
        arrays = [cupy.asarray(buffer[: case.nbytes]) for buffer in (self.send, self.recv)]
        send, recv = (array.view(case.type) for array in arrays)
        return Job(send, recv, self.bind(*tensors))

    @abstractmethod
    def bind(self, send: Any, recv: Any) -> functools.partial[Any]:
        """The call on two tensors."""

    @property
    def operation(self) -> Any:
        """The operator, resolved once: the figure is what a caller pays who does the same."""
        return getattr(self.torch.ops.symm_mem, self.operator).default

    def versions(self) -> dict[str, str]:
        """PyTorch's."""
        return {"torch": str(self.torch.__version__)}

    def close(self) -> None:
        """Leave the group, once a process."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()


class OneShot(_Symmetric):
    """Every rank reads everything."""

    operator = "one_shot_all_reduce_out"

    def bind(self, send: Any, recv: Any) -> functools.partial[Any]:
        """Out of place."""
        return functools.partial(self.operation, send, "sum", self._group, recv)


class TwoShot(_Symmetric):
    """Every rank sums its part, then reads the parts of the others."""

    operator = "two_shot_all_reduce_out"
    #: The sums of a rank's part are left in its input.
    keeps_input = False

    def bind(self, send: Any, recv: Any) -> functools.partial[Any]:
        """Out of place."""
        return functools.partial(self.operation, send, "sum", self._group, recv)
