"""Messages between a parent and its executor child: length-prefixed msgpack on a stream socket, decoded by type.

Frame: 4 bytes little-endian length, then the message. Every request has a ticket and gets exactly one reply with it.
"""

from __future__ import annotations

import socket
import struct
from typing import Generic, TypeAlias, TypeVar

import anyio
import msgspec

from deepinfra.core.ids import BlockId
from deepinfra.core.kv import KVLayout
from deepinfra.core.model import Computing, ExecutorIdentity, ExecutorLimits
from deepinfra.core.step import MaskRows, StepPlan, StepResult

__all__ = (
    "Channel",
    "Closed",
    "Done",
    "Drain",
    "Failed",
    "Garbage",
    "Lost",
    "Masks",
    "NotStarted",
    "Ready",
    "Reply",
    "Request",
    "Step",
    "Stop",
)

_LENGTH = struct.Struct("<I")
_MAX_NBYTES = 1 << 28  # far above any plan (a million opened tokens are 5 MB); a stray length must not be believed
_RECV_NBYTES = 1 << 18


class _Message(msgspec.Struct, frozen=True, array_like=True):
    """Fields cross as an array behind the tag."""


class Step(_Message, frozen=True, tag=1):
    """Run a step; reply `Done` or `Failed`."""

    ticket: int
    plan: StepPlan


class Masks(_Message, frozen=True, tag=2):
    """Token masks of a step in flight; no reply."""

    ticket: int
    rows: MaskRows


class Drain(_Message, frozen=True, tag=3):
    """Copy blocks to staging slots; reply `Done` without a result."""

    ticket: int
    blocks: tuple[BlockId, ...]
    slots: tuple[int, ...]


class Stop(_Message, frozen=True, tag=4):
    """Leave the executor and end; no reply."""


class Ready(_Message, frozen=True, tag=16):
    """The executor is entered; `layout` and `identity` let the parent see that both built the same one."""

    limits: ExecutorLimits
    layout: KVLayout
    identity: ExecutorIdentity
    provides: frozenset[str]
    computing: Computing


class NotStarted(_Message, frozen=True, tag=17):
    """The executor refused to start; `codes` name the error's class and its ancestors, nearest first."""

    codes: tuple[str, ...]
    message: str


class Done(_Message, frozen=True, tag=18):
    """A step's result, or `None` for a drain."""

    ticket: int
    result: StepResult | None = None


class Failed(_Message, frozen=True, tag=19):
    """A step failed for these sequences."""

    ticket: int
    seqs: tuple[int, ...]
    why: str


class Lost(_Message, frozen=True, tag=20):
    """The executor itself says that it is lost."""

    why: str


Request: TypeAlias = Step | Masks | Drain | Stop
Reply: TypeAlias = Ready | NotStarted | Done | Failed | Lost

In = TypeVar("In")


class Closed(Exception):
    """Raised when the other side is gone."""


class Garbage(Exception):
    """Raised when bytes arrive that are no message; nothing after them can be trusted."""


class Channel(Generic[In]):
    """One end of a stream socket, which it owns.

    Args:
        sock: Made non-blocking.
        incoming: Union of messages that may arrive.
    """

    def __init__(self, sock: socket.socket, incoming: object) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[In] = msgspec.msgpack.Decoder(incoming)
        self._unsent = bytearray()
        self._received = bytearray()
        self._flushing = anyio.Lock()

    def send(self, message: Request | Reply) -> bool:
        """Hand a message to the kernel, in order, without waiting.

        Returns:
            False if bytes are left over: somebody must `await flush()`. A vanished peer is the receiver's business.
        """
        frame = bytearray(_LENGTH.size)
        self._encoder.encode_into(message, frame, _LENGTH.size)
        _LENGTH.pack_into(frame, 0, len(frame) - _LENGTH.size)
        self._unsent += frame
        return self._push()

    async def flush(self) -> None:
        """Wait until everything is handed to the kernel."""
        async with self._flushing:
            while not self._push():
                await anyio.wait_writable(self._sock)

    async def receive(self) -> In:
        """Wait for one message; one task at a time.

        Raises:
            Closed: The other side is gone.
            Garbage: What arrived is no message.
        """
        while (message := self._pop()) is None:
            await anyio.wait_readable(self._sock)
            try:
                data = self._sock.recv(_RECV_NBYTES)
            except BlockingIOError:
                continue
            except OSError as error:
                raise Closed from error
            if not data:
                raise Closed
            self._received += data
        return message

    def close(self) -> None:
        """Close the socket; nobody may be waiting on it."""
        self._sock.close()

    def _push(self) -> bool:
        try:
            del self._unsent[: self._sock.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()
        return not self._unsent

    def _pop(self) -> In | None:
        if len(self._received) < _LENGTH.size:
            return None
        (nbytes,) = _LENGTH.unpack_from(self._received)
        if nbytes > _MAX_NBYTES:
            raise Garbage(f"a message of {nbytes} bytes")
        end = _LENGTH.size + nbytes
        if len(self._received) < end:
            return None
        with memoryview(self._received) as view:
            try:
                message = self._decoder.decode(view[_LENGTH.size : end])
            except msgspec.MsgspecError as error:
                raise Garbage(str(error)) from error
        del self._received[:end]
        return message
