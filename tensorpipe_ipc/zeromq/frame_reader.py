"""FrameReader: reads one ZeroMQ socket, a whole message at a time, and is sound whatever exception comes within.

A message stays the next one until it was dealt with, so that an exception of a signal's handler does not lose it. One that hits
inside pyzmq's own ``recv`` does: pyzmq looks for signals when it has the frame. What then remains of the message is dropped.
"""

from __future__ import annotations

import time
from typing import Any

import zmq

from tensorpipe_ipc.libc import trim_malloc
from tensorpipe_ipc.wire.layout import BULK

__all__ = ["FrameReader", "NamedFrameReader", "Tears"]

# Plain ints: each `|` of pyzmq's enum members costs a microsecond.
_WAIT, _DO_NOT_WAIT, _NO_COPY = (0,), (int(zmq.NOBLOCK),), (False,)  # for recv
_RCVMORE = int(zmq.RCVMORE)
# Frames that a message has beside those of ``BULK`` bytes or more, and the rest of each where long ones are cut: the sender's
# name, the header, an empty one that ends what was cut off. An empty frame is two bytes on the wire, and hundreds here.
_FRAMES = 4
_SURPLUS_AT_ONCE = 5000
_DROPPED_AT_ONCE = 500  # frames of those who were hung up on
_NAME_AT_ONCE = 1 << 13  # bytes of a name that take as long as a frame
_HUNG_UP = 1 << 14  # connections that may have said more before they were hung up on
# Bytes that were dropped, while more come; and when all are dropped.
_GIVE_BACK_AFTER, _GIVE_BACK_AT_LAST = 12 << 20, 1 << 20
# Bytes that each frame of use counts for, where a thousand or more came in a row: libzmq holds some KB for each.
_BACKLOG = 1 << 10
# Bytes that libzmq held a frame in beside its own: 64 of a short one, some KB of one of 34 bytes or more that came alone.
_BESIDE = 640
# Times as long as it took nothing more is given back: it takes 0.2 s where much lies free in pieces.
_GIVE_BACK_RARELY = 20


class Tears:
    """The count of messages that exceptions took out of the readers of one end."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class FrameReader:
    """A DEALER's.

    Attributes:
        frames: of the message in hand.
        surplus: why it is none: it had more frames than one of so many bytes has, and the first few were kept. "" of others.
        tears: counts how often an exception took a part of a message with it, or perhaps nothing.
    """

    def __init__(self, socket: zmq.Socket[bytes], tears: Tears) -> None:
        self.frames: list[Any] = []
        self.surplus = ""
        self.tears = tears
        self._socket = socket
        self._came = 0  # bytes of the message in hand
        self._has_surplus = False
        self._is_torn = False  # whether a receive was cut short
        self._owed = 0  # bytes that were dropped since memory was last given back
        self._in_a_row = 0  # frames of use since it was last found that nothing more has come
        self._is_wasted = False
        self._gives_back_from = 0.0

    def read(self, *, wait: bool) -> bool:
        """Have the next message in hand, if there is one; the same one again until ``received`` is called.

        Args:
            wait: whether to wait for it, as long as the socket's RCVTIMEO says.
        """
        if self._is_torn and not self._mend():
            return False
        if not self.frames:
            frames = self.frames
            try:
                self._is_torn = True
                self._came = 0
                if not self._begin(_WAIT if wait else _DO_NOT_WAIT):
                    self._is_torn = False
                    return False
                while frames[-1].more and not self._has_surplus:
                    self._came += len(frames[-1])
                    self._has_surplus = len(frames) > _FRAMES + 2 * self._came // BULK
                    self._receive_frame(_DO_NOT_WAIT)  # libzmq has the whole message
            except zmq.Again:
                self._is_torn = False
                self.give_back_at_last()
                return False
            self._is_torn = False
        return not self._has_surplus or self._drop_surplus()

    def received(self) -> None:
        """The message in hand has been dealt with."""
        if self._is_wasted:
            self._owed += sum(map(len, self.frames)) + _BESIDE * len(self.frames)
        else:
            self._in_a_row += len(self.frames)
        self.frames, self.surplus, self._is_wasted = [], "", False
        # Beside friends whose messages never end it is not found that nothing more has come.
        self._give_back(_GIVE_BACK_AFTER)

    def waste(self) -> None:
        """The message in hand is of no use: its frames are as good as dropped."""
        self._is_wasted = True

    def connections_ended(self) -> None:
        """Note that connections have ended, of whose handshakes libzmq had made much."""
        self._owed += _GIVE_BACK_AFTER

    def give_back_at_last(self) -> None:
        """Nothing more has come: have memory given back, if much was dropped, or much lay there at a time."""
        if self._in_a_row * _BACKLOG < _GIVE_BACK_AT_LAST:
            self._in_a_row = 0  # libzmq uses the same memory for the next ones
        self._give_back(_GIVE_BACK_AT_LAST)

    def _begin(self, flags: tuple[int]) -> bool:
        """Receive the first frame. Return whether there is a message to go on with."""
        self._receive_frame(flags)
        return True

    def _receive_frame(self, flags: tuple[int]) -> None:
        """One step in C from libzmq to the list: an exception comes before it or after it."""
        self.frames.extend(map(self._socket.recv, flags, _NO_COPY))

    def _is_whole(self) -> bool:
        return len(self.frames) > 0 and not self.frames[-1].more

    def _mend(self) -> bool:
        """An exception hit while frames came. If one is missing, the rest of its message is nobody's: drop a part of it in
        each turn. Return whether that is done."""
        if not self._is_whole():
            if not self._drop_frames():
                return False
            self.tears.count += 1  # no call comes from here on
            self.frames, self._has_surplus = [], False
        self._is_torn = False
        return True

    def _drop_surplus(self) -> bool:
        """Let frames go that belong to no message. Return whether all are gone."""
        if not self._drop_frames():
            return False
        self.surplus = f"a message of {self._came} bytes in over {len(self.frames) - 1} frames"
        self._has_surplus = False
        self.give_back_at_last()
        return True

    def _drop_frames(self) -> bool:
        """Drop what is left of a message: a few thousand frames in each turn, so that waits end in time. Whether it is done."""
        for _ in range(_SURPLUS_AT_ONCE):
            if not self._socket.getsockopt(_RCVMORE):
                return True
            self._owed += len(self._socket.recv(_DO_NOT_WAIT[0], copy=False)) + _BESIDE
        return False

    def _give_back(self, least: int) -> None:
        """Have malloc give back what libzmq held many frames in: it would keep it for more of them.

        malloc goes through all that lies free in the process, so that has a part of the time only.
        """
        if self._owed + self._in_a_row * _BACKLOG < least or (began := time.monotonic()) < self._gives_back_from:
            return
        self._owed = self._in_a_row = 0
        trim_malloc()
        now = time.monotonic()
        self._gives_back_from = now + _GIVE_BACK_RARELY * (now - began)


class NamedFrameReader(FrameReader):
    """A ROUTER's: the first frame of each message is the routing id of the peer that it came from.

    Attributes:
        dropped: messages that were dropped, of those from whom nothing is wanted any more.
    """

    def __init__(self, socket: zmq.Socket[bytes], tears: Tears) -> None:
        super().__init__(socket, tears)
        self._hung_up: dict[int, None] = {}  # hashes of routing ids: who chooses one may choose a megabyte
        self.dropped = 0

    def hang_up(self, routing: bytes) -> None:
        """Drop from now on what comes from there."""
        self._hung_up[hash(routing)] = None
        while len(self._hung_up) > _HUNG_UP:
            del self._hung_up[next(iter(self._hung_up))]

    def is_hung_up(self, routing: bytes) -> bool:
        """Return whether nothing is wanted from there any more."""
        return hash(routing) in self._hung_up

    def _is_whole(self) -> bool:
        return len(self.frames) > 1 and not self.frames[-1].more

    def _begin(self, flags: tuple[int]) -> bool:
        """Receive who sent the next message, and its first frame. Drop, as fast as can be, what comes before it of those who
        were hung up on. Return whether there is one, after no more of that than takes a millisecond."""
        frames, left = self.frames, _DROPPED_AT_ONCE
        while left > 0:
            self.frames.extend(map(self._socket.recv, flags))
            flags = _DO_NOT_WAIT
            self._receive_frame(flags)
            if not self.is_hung_up(frames[0]):
                return True
            left -= 1 + len(frames[0]) // _NAME_AT_ONCE + self._drop_further()
            if frames[1].more:  # the rest is surplus
                return True
            self.dropped += 1
            self._owed += len(frames[1]) + _BESIDE
            frames.clear()
            self._give_back(_GIVE_BACK_AFTER)
        return False

    def _drop_further(self) -> int:
        """Drop all frames of a message but its last, or as many as a turn may take. Return how many."""
        for count in range(_SURPLUS_AT_ONCE):
            if not self.frames[1].more:
                return count
            self._owed += len(self.frames[1]) + _BESIDE
            self._receive_frame(_DO_NOT_WAIT)
            del self.frames[1]
        return _SURPLUS_AT_ONCE
