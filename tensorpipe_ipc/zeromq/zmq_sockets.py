"""ZeroMQ's door: frames to and from peers, and their errors. The rest of the package sees no more of ZeroMQ.

A binder has a ROUTER (``binder``), a connector a DEALER for each connection (``connector``, ``line``). High-water marks are
off: what may be in flight is counted by credits, so nothing waits in ZeroMQ beyond them. But for what a consumer says over
tcp, where a stranger may ask for ever and never read. What a producer says there, beside its messages, is not said again
before ZeroMQ has let go of what was said before.

* LINGER is 0 from the start, and close says how long, but over tcp (``FrameSocket.close``). A session whose connection ends is
  told the linger of that moment, and libzmq's own is "for ever": with a message left in its pipe, and nobody to send it to,
  term never returned.
* Memory of the caller is never lent to ZeroMQ; that which a producer keeps over tcp is. pyzmq does this with a thread of
  its own (zmq.utils.garbage), which runs from the first producer over tcp on until the process ends.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import zmq

from tensorpipe_ipc.errors import OutOfMemory, Refused
from tensorpipe_ipc.handlers import reraise_from_handler
from tensorpipe_ipc.security import Curve
from tensorpipe_ipc.wire.layout import BULK
from tensorpipe_ipc.zeromq.addresses import Address
from tensorpipe_ipc.zeromq.curve import DOMAIN
from tensorpipe_ipc.zeromq.fragments import FRAGMENT, LARGEST_FRAGMENT, SHORT_FRAGMENT, in_fragments, joined
from tensorpipe_ipc.zeromq.frame_reader import FrameReader, Tears
from tensorpipe_ipc.zeromq.kernel_sockets import Progress, prepare_for_bulk, progress
from tensorpipe_ipc.zeromq.poll_fd import PollFd
from tensorpipe_ipc.zeromq.zmq_contexts import hold_reaper, release

__all__ = ["PEER_TIMEOUT", "SLICE", "FrameSocket", "heartbeats", "SocketError", "Unreachable", "library"]

SLICE = 0.1  # seconds: the longest that a wait goes without looking at who is still there
_SLICE_MS = int(SLICE * 1000)
_MORE, _LAST = int(zmq.SNDMORE | zmq.NOBLOCK), int(zmq.NOBLOCK)
# A connection by which nothing has come for so many seconds is given up, and made anew. On the way to another host routers may
# hold seconds of a slow line. What is lost there is sent again behind all that, and nothing comes until it is there.
_SILENCE, _SILENCE_AFAR = 1.6, 10.0
PEER_TIMEOUT = 60.0  # seconds that a silent peer is waited for, of which that may be a sixth
# An attempt to connect that the kernel would repeat after 1, 3, 7 ... s is made again by us after so many milliseconds, so that
# a line that is back is found within a second.
_CONNECT = 700
# Bytes of one frame: more than fits, and not "no limit", which a hostile length would take at its word.
_LARGEST = 1 << 40
# Messages of one frame that ZeroMQ may hold for a peer: more than one that reads ever leaves there.
_UNREAD = 64
_STEP = 0.01  # seconds of a wait for what has to leave, without a look at the connection
_SENDS = 0.2  # seconds that ZeroMQ's thread may take to send what was said last, on a machine with much else to do
_ROUND = 0.001  # seconds between two looks whether what has left has arrived
# Seconds that a goodbye has to leave, at most: to one who closes at this moment it never does. To arrive at another host, on a
# line that takes 0.6 s there and back, it may have to be sent twice.
_FAREWELL, _FAREWELL_AFAR = 1.0, 3.0
_MOST_UNREAD = 1024  # peers, until those are forgotten that have read


SocketError = zmq.ZMQError  # of this end's own socket, whatever came


class Unreachable(Exception):
    """The peer is not connected (any more). Never seen by users."""


class FrameSocket:
    """Frames to and from peers, each known by the routing id of its connection. See ``Binder`` and ``Connector``.

    Attributes:
        address: where; with the port that was chosen, if any was to do.
        binds: whether this end has the address.
        key: the public key of the end that binds, in Z85; "" without keys.
        connection: the number of a connector's connection, as it was last seen; 0 while there is none, or this end binds.
        routing: the routing id of that connection; b"" while there is none.
        farewell: seconds that a goodbye has to leave, at most, and over tcp to arrive at another host.
        silence: seconds without anything from a peer after which its connection is given up, over tcp.
        reads_out: the routing id of the connection before this one, as long as a connector still reads what came by it.
        tears: counts how often an exception hit inside a receive, and took a message with it, or perhaps nothing.
        dropped: messages that had come by connections that a binder had hung up on.
    """

    binds = False
    dropped = 0
    key = ""

    def __init__(
        self,
        address: Address,
        *,
        receives: bool,
        window: int = 0,
        security: Curve | None = None,
        peer_timeout: float = PEER_TIMEOUT,
    ) -> None:
        """Nothing is opened yet.

        Args:
            address: where.
            receives: whether this is the end that the messages come to.
            window: how many messages may be in flight to or from one peer.
            security: keys to use.
            peer_timeout: seconds that a silent peer is waited for, over tcp.
        """
        self.address = address
        self._heartbeats = heartbeats(is_remote=address.is_remote, peer_timeout=peer_timeout)
        self.farewell = _FAREWELL_AFAR if address.is_remote else _FAREWELL
        self.silence = (self._heartbeats[zmq.HEARTBEAT_TIMEOUT] + self._heartbeats[zmq.HEARTBEAT_IVL]) / 1000
        self.connection = 0
        self.routing = b""
        self.reads_out = b""
        self.tears = Tears()

        self._poll_fd: PollFd | None = None
        self._is_silent = False  # nothing had come at the last look, and its descriptor tells if anything does
        self._is_shown = False  # whether anybody has asked for fileno
        self._reader: FrameReader | None = None  # of the message in hand
        self._heard: Any = None  # the last frame that came to an end that sends
        self._window = window
        self._unread: dict[bytes, _Unread] = {}  # by peer, over tcp, of an end that sends
        self._may_be_unread = address.scheme == "tcp" and not receives
        self._said_before: dict[int, int] = {}  # bytes by descriptor, before a goodbye to another host
        self._cut_off: zmq.Socket[bytes] | None = None  # where an exception left a message begun, and not ended
        self._receives = receives
        self._security = security
        self._cuts = security is not None or address.scheme == "tcp"

    def open(self, told: Callable[[Exception], None]) -> None:
        """Bind or connect. May be cut short anywhere by an exception; then ``close`` leaves nothing of it.

        Args:
            told: is called with a ``Refused`` for everybody who comes with a key that is not on the list.

        Raises:
            ValueError: keys that are needed were not named.
            Refused: the address is in use, not allowed, or not safe, or a key file cannot be used.
        """
        raise NotImplementedError

    def _set_up(self, socket: zmq.Socket[bytes], options: dict[Any, Any]) -> None:
        """Set a new socket's options: those that both kinds have, and some more."""
        is_tcp = self.address.scheme == "tcp"
        both: dict[Any, Any] = {
            zmq.LINGER: 0,
            zmq.SNDHWM: min(2 * self._window + _UNREAD, 1 << 30) if self._receives and is_tcp else 0,
            # Over tcp libzmq ends the process (!_io_error) where a connection ends whose reading a mark has stopped.
            zmq.RCVHWM: 0,
            zmq.MAXMSGSIZE: LARGEST_FRAGMENT if self._cuts else _LARGEST,
            zmq.RCVTIMEO: _SLICE_MS,
            zmq.HANDSHAKE_IVL: 3000,
            # Nobody is asked about it. But by a socket that has one libzmq speaks no version so old that it has no handshake.
            # What comes without can neither be told from which connection it is, nor be hung up on.
            zmq.ZAP_DOMAIN: DOMAIN,
        }
        if is_tcp:
            both |= {zmq.IPV6: 1, **self._heartbeats}
        for option, value in {**both, **options}.items():
            socket.setsockopt(option, value)

    # -- what goes out

    def _socket_to(self, peer: bytes) -> zmq.Socket[bytes]:
        """Return the socket by which a peer is sent to.

        Raises:
            Unreachable: its connection has ended.
        """
        raise NotImplementedError

    def send(self, peer: bytes, frames: Sequence[Any]) -> None:
        """Send one message, which is copied.

        ZeroMQ could read large frames from the caller's memory. But then an exception of a signal's handler, or another
        thread's close, would leave it reading what the caller writes anew; and put would wait for a consumer that is stopped.

        Args:
            peer: the routing id of its connection.
            frames: bytes-like objects.

        Raises:
            Unreachable: that connection has ended. Nothing was sent.
        """
        self.lend(peer, frames, large=False)

    def lend(
        self, peer: bytes, frames: Sequence[Any], *, large: bool = True, mark: bool = False, is_slow: bool = False
    ) -> list[Any]:
        """Send one message, whose large frames ZeroMQ may read from the caller's memory for as long as it likes.

        Args:
            large: False: they are copied.
            mark: lend the last one, however small: with it ZeroMQ has let go of all that went before, to this peer.
            is_slow: whether the line may be slow: heartbeats are to pass more often.

        Returns:
            A tracker for each that was lent: it is ``done`` when ZeroMQ has let go of it, whoever got it.

        Raises:
            Unreachable: as ``send``.
            OutOfMemory: ZeroMQ has no memory for it. A part of it may have been sent.
        """
        self._is_silent = False
        socket = self._socket_to(peer)
        if self._cuts:
            frames = in_fragments(frames, SHORT_FRAGMENT if is_slow else FRAGMENT)
        send, last = socket.send, len(frames) - 1
        trackers = []
        if self._cut_off is not None:
            self._end_cut_off()
        self._cut_off = socket
        try:
            if self.binds:
                send(peer, _MORE)
            for index, frame in enumerate(frames):
                flags = _MORE if index < last else _LAST
                if large and len(frame) >= BULK:
                    hold_reaper()
                    trackers.append(send(frame, flags, copy=False, track=True))
                elif mark and index == last and (marked := _marked(bytes(frame))) is not None:
                    trackers.append(send(marked, flags, copy=False, track=True))
                else:
                    send(frame, flags)
        except zmq.ZMQError as error:
            if error.errno == errno.ENOMEM:
                total = sum(map(len, frames))
                raise OutOfMemory(
                    f"ZeroMQ has no memory for a message of {total:,} bytes; send it in parts. It was not sent"
                ) from None
            self._cut_off = None
            if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise Unreachable from None
            raise
        self._cut_off = None
        return trackers

    def send_small(self, peer: bytes, frame: bytes) -> bool:
        """Send a message of one frame, which is copied.

        Nothing is sent, and True returned, to one over tcp that has not read what was sent to it so before.

        Args:
            peer: the routing id of its connection.
            frame: its bytes.

        Returns:
            False if that connection has ended. Then nothing was sent.
        """
        unread = self._unread.get(peer)
        if unread is not None and unread.first.done:
            unread = None
        if unread is not None:
            if unread.count >= _UNREAD:
                return True
            unread.count += 1
        try:
            trackers = self.lend(peer, [frame], large=False, mark=self._may_be_unread)
        except Unreachable:
            return False
        for tracker in trackers:
            if unread is None:
                self._note_unread(peer, tracker)
            else:
                unread.last = tracker
        return True

    def prepare_to_part(self) -> None:
        """Have ``close`` know, to another host, what is said from here on from what was said before."""
        there = self._progress(self._connection_fds()) if self.address.is_remote else {}
        self._said_before = {fd: each.written for fd, each in there.items()}

    def _progress(self, fds: list[int]) -> dict[int, Progress]:
        found = ((fd, progress(fd, self.address)) for fd in fds)
        return {fd: each for fd, each in found if each is not None}

    def _end_cut_off(self) -> None:
        """End a message that an exception cut off, somewhere: its last frame is empty, as no payload frame is.

        Where nothing is open, it goes to nobody (ROUTER) or is a message of its own (DEALER): the receiver drops both. It is
        done before the next message, and not at once: the next exception may come at once, too.
        """
        assert self._cut_off is not None
        with suppress(zmq.ZMQError):
            self._cut_off.send(b"", _LAST)
        self._cut_off = None

    def _note_unread(self, peer: bytes, tracker: Any) -> None:
        if len(self._unread) >= _MOST_UNREAD:
            self._unread = {peer: unread for peer, unread in self._unread.items() if not unread.last.done}
        self._unread[peer] = _Unread(tracker)

    # -- what comes in

    def receive(self, timeout: float) -> tuple[bytes, list[Any]] | None:
        """Return the next message: by whose connection it came, and its frames as buffers that are nobody else's. None if
        there is none in time, or much had come that is to be dropped.

        It is the next one again until ``received`` is called.

        Args:
            timeout: seconds, at most ``SLICE``.
        """
        raise NotImplementedError

    def _read(self, reader: FrameReader, socket: zmq.Socket[bytes], timeout: float) -> list[Any] | None:
        """Return the frames of the message that is now in hand; None if there is none in time."""
        self._reader = reader
        if not reader.frames and 0 < timeout < SLICE and not socket.poll(max(1, int(timeout * 1000))):
            reader.give_back_at_last()
            return None
        if not reader.read(wait=timeout >= SLICE):
            return None
        if not self._receives:
            self._heard = reader.frames[-1]
        return reader.frames

    def joined(self, buffers: list[Any]) -> tuple[list[Any], str]:
        """Return the frames of a message that ``receive`` returned, put together, and ""; else as ``fragments.joined``."""
        return joined(buffers) if self._cuts else (buffers, "")

    @property
    def surplus(self) -> str:
        """Return why the message that ``receive`` returned is invalid; "" if it is valid.

        It had more frames than one of its bytes has, and the first few were kept; or it came by a connection that is refused.
        """
        return "" if self._reader is None else self._reader.surplus

    def received(self) -> None:
        """The message that ``receive`` returned has been dealt with."""
        if self._reader is not None:
            self._reader.received()

    def waste(self) -> None:
        """The message that ``receive`` returned is of no use. The memory of many such messages is given back."""
        if self._reader is not None:
            self._reader.waste()

    def prepare_for_bulk(self) -> None:
        """Have the connection that the last message came by set up for large frames, the other way."""
        if self.address.scheme != "inproc" and self._heard is not None and not self.address.is_remote:
            with suppress(zmq.ZMQError):  # ZeroMQ has noted none, of one that was gone at once
                prepare_for_bulk(self._heard.get(zmq.SRCFD), self.address)

    def process_behind(self) -> int:
        """Return the process that the last message came from, to a binder over ipc; 0 where it is not known."""
        return 0

    def has_just_let_somebody_in(self) -> bool:
        """Return whether somebody with a good key has just come, whose first word is on its way."""
        return False

    def is_behind(self) -> bool:
        """Answer those who have knocked, and return whether there are more than one call answers: some of them may wait."""
        return False

    def has_incoming(self) -> bool:
        """Return whether ``receive`` would find something now."""
        raise NotImplementedError

    def has_unread(self, routing: bytes) -> bool:  # noqa: ARG002 - a binder has all in one socket
        """Return whether something may have come by a connection, standing or ended, that was not received yet."""
        return self.has_incoming()

    def is_connected(self, timeout: float = 0) -> bool:
        """Return whether a connector has its binder on the line, within ``timeout`` seconds."""
        raise NotImplementedError

    def reaches(self, routing: bytes) -> bool:
        """Return whether a connector's connection of that routing id stands."""
        return self.is_connected() and routing == self.routing

    # -- a binder's

    def hang_up(self) -> None:
        """Have nothing more come by the connection that a binder's message in hand came by."""

    # -- a connector's

    def try_now(self, timeout: float) -> bool:
        """Return whether a connector has its binder on the line, after one try at once that may take ``timeout`` seconds."""
        raise NotImplementedError

    def drop(self, routing: bytes) -> None:
        """Hang up a connector's connection; what came by it and was not read is dropped. Try to get the binder anew."""

    def defer(self) -> None:
        """Have the message in hand, and all that comes by its connection, wait until that of the one before is received."""

    def is_orphaned(self, routing: bytes) -> bool:  # noqa: ARG002 - a binder is no child's
        """Return whether a connector has a connection with a dead process: a child of that holds it open."""
        return False

    def is_replaced(self, routing: bytes) -> bool:  # noqa: ARG002 - a binder is no child's
        """Return whether a connector's address is another's by now than of who is at the other end of a connection."""
        return False

    def connect_error(self) -> str:
        """Say why a connector does not get in; "" as long as nothing is known to be in the way."""
        return ""

    # -- waiting

    @property
    def is_watched(self) -> bool:
        """Return whether anybody has asked for ``fileno``, so that it must be kept up to date."""
        return self._is_shown

    def watch(self, fd: int, *, edge: bool = False) -> None:
        """Have ``wait_any``, and ``fileno``, tell of another descriptor. Again: nothing.

        Args:
            edge: tell when something is added, not as long as there is something.
        """
        self._polling().watch(fd, edge)

    def prepare_to_lend(self) -> None:
        """Start what lends memory, and sends marks, before ``open``: when somebody comes there may be no descriptor left.

        Raises:
            Refused: too few are left now.
        """
        if self._may_be_unread:
            hold_reaper()
            _marked(b"the first")  # has pyzmq open a socket to its thread

    def prepare_to_wait(self) -> None:
        """Open what waits need, for the same reason, after ``open``.

        Raises:
            OSError: no descriptor is left now.
        """
        self._polling()

    def unwatch(self, fd: int) -> None:
        """The end of that; before the descriptor is closed."""
        self._polling().unwatch(fd)

    def wait_any(self, timeout: float) -> list[int]:
        """Wait up to ``timeout`` seconds, at most a slice, until something comes. The descriptors, of whatever is watched.

        Of a message it tells only once ``has_incoming`` has said that there is none; a connector's binder is something, too.
        """
        found = (self._poll_fd or self._polling()).wait(min(timeout, SLICE))
        self._see_to(found)
        return found

    def _see_to(self, found: list[int]) -> None:
        """See to those of this socket's own descriptors that tell of something."""
        raise NotImplementedError

    def is_silent(self) -> bool:
        """Return whether nothing has come, for ``wait_any``'s sake; without a look where that would have told."""
        return self._is_silent or not self.has_incoming()

    def _polling(self) -> PollFd:
        if self._poll_fd is None:
            self._poll_fd = PollFd(self._own_fds())
        return self._poll_fd

    def _own_fds(self) -> list[int]:
        raise NotImplementedError

    def fileno(self) -> int:
        """Return a descriptor that is readable whenever something has come since ``look``, and as long as ``show`` says so.

        Raises:
            OSError: no descriptor is left.
        """
        self._polling().prepare_to_show()
        self._is_shown = True
        return self._polling().fd

    def look(self) -> bool:
        """Return whether ``receive`` would find something now. ``fileno`` tells no more of what has changed until now."""
        return self.has_incoming()

    def show(self, ready: bool) -> None:
        """Have ``fileno`` be readable, or only when something comes."""
        if self._poll_fd is not None:
            self._poll_fd.show(ready)

    def close(self, linger: float) -> None:
        """Close. What was sent goes on leaving for up to ``linger`` seconds. Again: what an exception left undone.

        Over tcp it has to leave before. There libzmq ends the process (!_io_error) where a socket was closed with a linger, its
        peer said something, and the connection was reset before all had left: by its next heartbeat. Without a linger what is
        small leaves nevertheless, unless the connection is busy with what came before.

        To another host it has to arrive before, too. To what comes to a tcp socket that was closed, as a heartbeat does, the
        kernel answers with a reset, and forgets what it would have sent again.
        """
        is_tcp, deadline = self.address.scheme == "tcp", time.monotonic() + linger
        with ExitStack() as steps:  # from the last to the first; each is done though an exception cuts another short
            steps.callback(release, self)
            steps.callback(self._close_sockets, 0.0 if is_tcp else linger)
            steps.callback(self._give_address_back)
            if self._poll_fd is not None:
                steps.callback(self._poll_fd.close)
            if self.address.is_remote:
                steps.callback(self._let_arrive, deadline)
            if is_tcp:
                steps.callback(self._let_leave, deadline)

    def _let_leave(self, deadline: float) -> None:
        """Wait until ZeroMQ has let go of all that was said by messages of one frame, and so of what was sent before them."""
        unread, self._unread = self._unread, {}  # once, whatever comes: a second close meets sockets that are closed
        for peer, said in unread.items():
            while self.binds or self.reaches(peer):  # what nobody can get a ROUTER drops, and a DEALER keeps
                left = deadline - time.monotonic()
                with suppress(zmq.NotDone):
                    said.last.wait(max(0.0, min(left, _STEP)))
                    break
                if left <= 0:
                    return

    def _let_arrive(self, deadline: float) -> None:
        """Wait until the hosts at the other ends have acknowledged what was said until now: heartbeats go on leaving."""
        until, sent = time.monotonic() + _SENDS, dict[int, Progress]()
        sending = self._progress(self._connection_fds()) if time.monotonic() < deadline else {}
        while sending and time.monotonic() < deadline:
            time.sleep(_ROUND)
            before, sending = sending, self._progress(list(sending))
            is_over = time.monotonic() >= until  # else ZeroMQ's thread may not have begun with the goodbye
            for fd, now in list(sending.items()):
                has_begun = is_over or now.written != self._said_before.get(fd)
                if has_begun and not self._is_sending(before[fd], now):
                    sent[fd] = sending.pop(fd)
        for fd, last in (sent | sending).items():
            while (then := progress(fd, self.address)) is not None and then.acknowledged < last.written <= then.written:
                if time.monotonic() >= deadline:
                    return
                time.sleep(_ROUND)

    @staticmethod
    def _is_sending(before: Progress, now: Progress) -> bool:
        """Return whether ZeroMQ's thread may have more to write: the kernel had no room for it, or has just got some."""
        return not (before.has_room and now.has_room) or before.written != now.written

    def _connection_fds(self) -> list[int]:
        """Return the descriptors, which are libzmq's, of the tcp connections that stand."""
        raise NotImplementedError

    def _give_address_back(self) -> None:
        """Have the next binder get the address; what was sent goes on leaving."""

    def _close_sockets(self, linger: float) -> None:
        raise NotImplementedError


def heartbeats(*, is_remote: bool, peer_timeout: float) -> dict[Any, int]:
    """Return the options by which a silent connection over tcp is given up.

    Args:
        is_remote: whether other hosts come into it.
        peer_timeout: as in ``FrameSocket``.
    """
    silence = max(_SILENCE, min(_SILENCE_AFAR, peer_timeout / 6)) if is_remote else _SILENCE
    milliseconds = int(1000 * silence)
    return {
        zmq.HEARTBEAT_IVL: 400,
        zmq.HEARTBEAT_TIMEOUT: milliseconds,
        zmq.HEARTBEAT_TTL: milliseconds,
        zmq.TCP_MAXRT: milliseconds + 1400,
        zmq.CONNECT_TIMEOUT: _CONNECT,
    }


def _marked(frame: bytes) -> zmq.Frame | None:
    """Return a small frame that is lent. What tracks it tells when ZeroMQ has let go of it, and of all before it.

    None once pyzmq's thread has ended with the program.
    """
    try:
        hold_reaper()
        return zmq.Frame(frame, track=True, copy=False, copy_threshold=0)
    except (RuntimeError, Refused) as error:
        reraise_from_handler(error)
        return None


class _Unread:
    """The messages that were sent to one peer, and may still be with ZeroMQ."""

    __slots__ = ("count", "first", "last")

    def __init__(self, tracker: Any) -> None:
        self.first = self.last = tracker
        self.count = 1


def library() -> tuple[str, str, bool]:
    """Return the versions of pyzmq and libzmq, and whether that has CURVE."""
    return zmq.__version__, zmq.zmq_version(), bool(zmq.has("curve"))
