"""The calls of a communicator, as ``cupyx.distributed.NCCLBackend`` has them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from ..errors import InvalidValueError
from .call import Call
from .checks import Checker
from .engine import Engine
from .plan import Operation
from .point_to_point import Letter, Parcel

__all__ = ["Calls"]


class Calls(ABC):
    """Collectives and point-to-point calls: checks, then one call of the engine.

    All of them enqueue on a stream and do not wait for it: ``stream``, or the current one. Arrays
    are ``cupy.ndarray`` in one piece, in C or Fortran order, both of a call in the same one.
    Elements are passed on as they lie in memory. dtypes: those of CuPy (bool, integers, floats,
    float16, complex64, complex128) and bfloat16, equal in both arrays.

    Where other ranks touch an array that is not registered, it is copied through scratch. On the
    host engine they touch the input of ``all_reduce``, ``reduce``, ``broadcast`` (root),
    ``reduce_scatter``, ``all_gather``, ``scatter`` (root), ``all_to_all`` and ``send_recv``, and
    the output of ``all_reduce``, ``reduce`` (root) and ``gather`` (root). On the device engine
    small messages need no registration, and of large ones it is the outputs, and the inputs of
    reductions of a middle size.

    In place means that input and output are one array or, where one of them has a row for each
    rank, that the other one is this rank's (``scatter``, ``gather``: the root's) row of it. It is
    allowed everywhere. Arrays that overlap in another way work too, at the price of a copy.

    On a stream that is capturing a call is recorded, by all ranks together: they compare what they
    capture and register its arrays, whose memory is kept until the graph and all its executables
    are gone. Point-to-point calls are recorded without a word to the peers, and must be replayed in
    the order in which they fit; their arrays are kept as well, but not registered.

    Raises (every call; before anything is enqueued):
        InvalidTypeError: no ``cupy.ndarray``, an unknown dtype, unequal dtypes, no integer.
        InvalidValueError: sizes, order, device, root or peer, op; with both sides.
        NotZeroCopyError: the communicator is strict, and this rank would copy.
        ClosedError: the communicator is closed, or a former call failed.

    Raises (a collective in a capture; nothing is recorded then):
        MismatchError: ranks capture different calls, or one of them is at another call.
        AgreementError: a rank could not register its arrays, or is strict and would copy.
        PeerTimeoutError: a rank has gone or did not come in time. The communicator is over then.

    Raises (every call, when it runs; from ``synchronize()`` where it was queued):
        MismatchError: ranks call different things; on all of them, nothing written. NCCL compares
            nothing: what it carries then ends in a PeerTimeoutError, or mixes up data.
        PeerTimeoutError: a rank has gone or did not come in time. The communicator is over then.
    """

    _checker: Checker
    _engine: Engine

    def preload(self, dtype: Any, op: str = "sum") -> None:
        """Load the kernels of all collectives of a dtype, and of an op where they reduce. Local.

        CUDA loads a kernel when it is called for the first time, which takes up to seconds where it
        is not in CuPy's cache on disk, and waits until what runs on the device has ended. Not
        needed, unless a call is the first of its kind while a collective on another stream (a graph
        that is replayed, say) waits for a rank that in turn waits for this call: that ends at the
        deadline. It holds for kernels of any library, CuPy's own among them.

        Args:
            dtype: Of the arrays.
            op: As in :meth:`all_reduce`.

        Raises:
            InvalidTypeError, InvalidValueError: collectives do not know the dtype, or the op.
            DriverError: a kernel does not compile, or cannot be loaded.
        """
        self._engine.preload(*self._checker.kind("preload", dtype, op))

    @abstractmethod
    def _again(self, key: tuple[Any, ...], source: Any, target: Any, stream: Any) -> bool:
        """Enqueue a call that was made before with the same arguments.

        Args:
            key: The arguments, the arrays by ``id``.
            source: The arrays themselves.
            target: As above.
            stream: Where.

        Returns:
            False where that cannot be, and nothing was done.
        """

    @abstractmethod
    def _collective(
        self, call: Call, stream: Any, key: tuple[Any, ...], source: Any, target: Any
    ) -> None:
        """Enqueue a collective, and keep how it was done for :meth:`_again`."""

    @abstractmethod
    def _mail(self, letter: Letter, stream: Any, key: tuple[Any, ...]) -> None:
        """Enqueue a point-to-point call, and keep it as :meth:`_collective` does."""

    def all_reduce(
        self, in_array: Any, out_array: Any, op: str = "sum", stream: Any = None
    ) -> None:
        """Reduce the arrays of all ranks element by element; every rank gets the result.

        Args:
            in_array: What this rank adds.
            out_array: Gets the result; at least as many elements as ``in_array``.
            op: "sum", "prod", "min", "max" or "avg". Complex arrays have no min and max; bool has
                no avg. Sums of 16-bit floats accumulate in float32, but for what NCCL does; the
                avg of integers is truncated towards zero.
            stream: None for the current one.
        """
        key = (Operation.ALL_REDUCE, id(in_array), id(out_array), op)
        if not self._again(key, in_array, out_array, stream):
            self._collective(
                self._checker.all_reduce(in_array, out_array, op), stream, key, in_array, out_array
            )

    def reduce(
        self, in_array: Any, out_array: Any, root: int = 0, op: str = "sum", stream: Any = None
    ) -> None:
        """As :meth:`all_reduce`, but only ``root`` gets the result.

        Args:
            in_array: What this rank adds.
            out_array: On the root as in :meth:`all_reduce`; not looked at elsewhere.
            root: The rank that gets the result.
            op: As in :meth:`all_reduce`.
            stream: None for the current one.
        """
        key = (Operation.REDUCE, id(in_array), id(out_array), root, op)
        if not self._again(key, in_array, out_array, stream):
            self._collective(
                self._checker.reduce(in_array, out_array, root, op),
                stream,
                key,
                in_array,
                out_array,
            )

    def broadcast(self, in_out_array: Any, root: int = 0, stream: Any = None) -> None:
        """Copy the array of ``root`` to that of all other ranks.

        Args:
            in_out_array: Given on the root, overwritten elsewhere; as many elements on all ranks.
            root: The rank that gives.
            stream: None for the current one.
        """
        key = (Operation.BROADCAST, id(in_out_array), root)
        if not self._again(key, in_out_array, in_out_array, stream):
            call = self._checker.broadcast(in_out_array, root)
            self._collective(call, stream, key, in_out_array, in_out_array)

    def reduce_scatter(
        self, in_array: Any, out_array: Any, count: int, op: str = "sum", stream: Any = None
    ) -> None:
        """Reduce as :meth:`all_reduce`, and give each rank one part of the result.

        Args:
            in_array: At least ``size * count`` elements; elements ``rank * count`` and following
                are the rank's part.
            out_array: Gets this rank's part; at least ``count`` elements.
            count: Elements of a part.
            op: As in :meth:`all_reduce`.
            stream: None for the current one.
        """
        key = (Operation.REDUCE_SCATTER, id(in_array), id(out_array), count, op)
        if not self._again(key, in_array, out_array, stream):
            call = self._checker.reduce_scatter(in_array, out_array, count, op)
            self._collective(call, stream, key, in_array, out_array)

    def all_gather(self, in_array: Any, out_array: Any, count: int, stream: Any = None) -> None:
        """Give every rank the arrays of all ranks, one after the other.

        Args:
            in_array: At least ``count`` elements.
            out_array: At least ``size * count`` elements.
            count: Elements that each rank gives.
            stream: None for the current one.
        """
        key = (Operation.ALL_GATHER, id(in_array), id(out_array), count)
        if not self._again(key, in_array, out_array, stream):
            self._collective(
                self._checker.all_gather(in_array, out_array, count),
                stream,
                key,
                in_array,
                out_array,
            )

    def gather(self, in_array: Any, out_array: Any, root: int = 0, stream: Any = None) -> None:
        """Give ``root`` the arrays of all ranks, one after the other.

        Args:
            in_array: As many elements on all ranks.
            out_array: On the root ``size`` times as many, in C order, usually of shape
                ``(size, ...)``; not looked at elsewhere.
            root: The rank that gets them.
            stream: None for the current one.
        """
        key = (Operation.GATHER, id(in_array), id(out_array), root)
        if not self._again(key, in_array, out_array, stream):
            self._collective(
                self._checker.gather(in_array, out_array, root), stream, key, in_array, out_array
            )

    def scatter(self, in_array: Any, out_array: Any, root: int = 0, stream: Any = None) -> None:
        """Give each rank its row of the array of ``root``.

        Args:
            in_array: On the root, ``size`` times the elements of ``out_array``, in C order, usually
                of shape ``(size, ...)``; not looked at elsewhere.
            out_array: Gets this rank's row; as many elements on all ranks.
            root: The rank that gives.
            stream: None for the current one.
        """
        key = (Operation.SCATTER, id(in_array), id(out_array), root)
        if not self._again(key, in_array, out_array, stream):
            self._collective(
                self._checker.scatter(in_array, out_array, root), stream, key, in_array, out_array
            )

    def all_to_all(self, in_array: Any, out_array: Any, stream: Any = None) -> None:
        """Give each rank its row of the arrays of all ranks.

        Args:
            in_array: In C order, usually of shape ``(size, ...)``; row ``r`` goes to rank ``r``.
            out_array: As many elements, in C order; row ``r`` comes from rank ``r``.
            stream: None for the current one.
        """
        key = (Operation.ALL_TO_ALL, id(in_array), id(out_array))
        if not self._again(key, in_array, out_array, stream):
            self._collective(
                self._checker.all_to_all(in_array, out_array), stream, key, in_array, out_array
            )

    def send(self, array: Any, peer: int, stream: Any = None) -> None:
        """Send an array to one rank. It does not wait for the receiver, so it copies the array.

        On a GPU what does not fit the channel to that rank, 2 MiB at least, waits there for the
        receiver, beside other work; calls that wait for the whole device wait for it, too. In a
        capture nothing is copied, and the replay waits.

        Args:
            array: What to send.
            peer: The rank that receives it.
            stream: None for the current one.
        """
        peer = self._checker.rank_of("send", "peer", peer)
        self._mail(Letter("send", peer, self._parcel("send", "array", array), None), stream, ())

    def recv(self, out_array: Any, peer: int, stream: Any = None) -> None:
        """Receive the next array that one rank sends to this one.

        Args:
            out_array: Gets it; of the dtype, the order and the number of elements that were sent,
                or it is a MismatchError here.
            peer: The rank that sends.
            stream: None for the current one.
        """
        peer = self._checker.rank_of("recv", "peer", peer)
        key = ("recv", id(out_array), peer)
        if not self._again(key, out_array, out_array, stream):
            taken = self._parcel("recv", "out_array", out_array)
            self._mail(Letter("recv", peer, None, taken), stream, key)

    def send_recv(self, in_array: Any, out_array: Any, peer: int, stream: Any = None) -> None:
        """Send one array to a rank and receive another one from it.

        Args:
            in_array: What to send; not copied where it is registered.
            out_array: Gets what the peer sends; may have another size and dtype.
            peer: The other rank, which calls ``send_recv`` too, or ``send`` and ``recv``.
            stream: None for the current one.
        """
        call = "send_recv"
        peer = self._checker.rank_of(call, "peer", peer)
        key = (call, id(in_array), id(out_array), peer)
        if self._again(key, in_array, out_array, stream):
            return
        given = self._parcel(call, "in_array", in_array)
        taken = self._parcel(call, "out_array", out_array)
        if peer == self._checker.rank and given.kind != taken.kind:
            raise InvalidValueError(
                self._checker.name(call), "out_array", str(taken),
                f"{given}, which this rank sends to itself",
            )  # fmt: skip
        self._mail(Letter(call, peer, given, taken), stream, key)

    def _parcel(self, call: str, name: str, array: Any) -> Parcel:
        info = self._checker.array(call, name, array)
        return Parcel(array, info, int(info.order == "F"))
