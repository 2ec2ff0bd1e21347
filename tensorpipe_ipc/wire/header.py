"""Frame 0 of every message: the fixed prefix, the message kinds, and the control messages behind them.

Little-endian::

    offset 0            4         5      6      8              16           20            24
           +------------+---------+------+------+--------------+------------+------------+--------+--------+--------+
           | magic TPIC | version | kind |  0   | sequence u64 | schema len | values len | schema | values | packed |
           +------------+---------+------+------+--------------+------------+------------+--------+--------+--------+

* HELLO, WELCOME, REFUSED: ``schema`` is a msgpack map (``Hello``; ``Refusal`` for the last), ``values`` is empty. A
  connector says HELLO and the binder answers; a binder says HELLO to a stranger who talks as if they had met.
* DATA: ``schema`` says what stands where and how to read the payloads, and is equal for all messages of a steady
  stream, so both ends keep it; ``values`` is a msgpack array of the numbers and strings that differ; ``packed`` is the
  small payloads, which are copied anyway and would cost more as a frame of their own (see ``message``).
  ``sequence`` counts the producer's messages towards this peer, from that of its HELLO or WELCOME.
* PIECE: a part of the large payloads of the DATA message of that ``sequence``, which follows when all its pieces are sent.
  ``schema`` is two numbers (``Piece``); the part is the next frame. Payloads follow each other in this, each at the next
  multiple of 64.
* CREDIT: ``sequence`` is the highest that the consumer has taken: acknowledgement and credit in one. No body.
* GOODBYE: ``sequence`` is the last that was sent. No body; or, from an end that failed, a msgpack map (``Ending``).

A control message is short, and what is not is not read. So what one end repeats of another, which may say anything, is cut:
the names of the host and of its boot, and why there is no shared memory, as they come in, a refusal's reason as it goes out. Of
each text that comes in, what a terminal would obey becomes a question mark.

The version stands for the whole format: the prefix, the schema, the spec, the metas. Golden bytes in the tests hold it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from typing import Annotated, Any, NamedTuple, TypeVar, cast

import msgspec
from msgspec.structs import replace

from tensorpipe_ipc.errors import ProtocolError, VersionMismatch
from tensorpipe_ipc.process import Identity

__all__ = [
    "MAX_HEADER",
    "MAX_NAMES",
    "PREFIX",
    "VERSION",
    "Claimed",
    "Ending",
    "Header",
    "Hello",
    "Kind",
    "Piece",
    "Refusal",
    "SharedMemoryTerms",
    "Whereabouts",
    "cut",
    "ending_of",
    "failed",
    "names_size",
    "pack",
    "pack_control",
    "pack_goodbye",
    "pack_piece",
    "pack_refusal",
    "piece_of",
    "shown",
    "unpack",
    "unpack_begin",
    "unpack_control",
    "whereabouts_in",
]

MAGIC = b"TPIC"
VERSION = 6
MAX_HEADER = 1 << 23  # 8 MiB: room for the metas of MAX_NODES leaves of a few dimensions each
MAX_CONTROL = 1 << 12  # a HELLO needs some 300 bytes; an unknown peer gets no more to say
MAX_NAMES = 2640  # of the serializers that a consumer accepts: 40 of the longest; all else takes less than what is left
_MAX_HOST = 255  # bytes; POSIX allows no longer name
_MAX_BOOT = 80  # the kernel's 36, and an inode
_MAX_WHY_NOT = 512
_MAX_REASON = 4000
_MAX_FAILURE = 1024
_MAX_ORIGIN = 300

PREFIX = struct.Struct("<4sBBHQII")
_PIECE = struct.Struct("<QQ")
MAX_BODY = MAX_HEADER - PREFIX.size  # schema and values


class Kind:
    """The kinds of messages."""

    HELLO, WELCOME, REFUSED, DATA, CREDIT, GOODBYE, PIECE = range(1, 8)
    NAMES = ("", "HELLO", "WELCOME", "REFUSED", "DATA", "CREDIT", "GOODBYE", "PIECE")


class Header(NamedTuple):
    """Frame 0, taken apart; nothing in ``schema`` and ``values`` has been looked at."""

    kind: int
    sequence: int
    schema: bytes
    values: memoryview
    packed: memoryview

    def payloads(self, frames: list[Any]) -> list[Any]:
        """Return the payload frames, of which the small payloads' is first, of all the frames of the message."""
        return [self.packed, *frames[1:]] if len(self.packed) else frames[1:]


class Piece(NamedTuple):
    """The body of a PIECE: the place of its part.

    Attributes:
        offset: where in the large payloads it begins, in bytes.
        total: how long they are together.
    """

    offset: int
    total: int


_AtLeast0 = Annotated[int, msgspec.Meta(ge=0)]
_AtLeast1 = Annotated[int, msgspec.Meta(ge=1)]


class SharedMemoryTerms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The terms on which an end uses shared memory. They name nothing to open: that stands in the binder's rendezvous file.

    Attributes:
        wish: "auto" or "require". (An end that wants none has no terms.)
        uid: of its user.
        attached: the token of the queue that the two have: the connector has claimed it, the binder repeats it; 0: none.
        unknown: from a binder: the token that the connector said, of which it has no queue; 0: none.
        why_not: why there is, or can be, none; "" as long as nothing is in the way.
    """

    wish: str
    uid: int
    attached: _AtLeast0 = 0
    unknown: _AtLeast0 = 0
    why_not: str = ""


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of HELLO and of WELCOME: the identity of an end, and its offer.

    Attributes:
        role: "producer" or "consumer".
        identity: the process.
        window: the most messages that may be in flight between the two; the smaller of both ends' counts.
        serializer: the name of the producer's serializer; empty from a consumer.
        accepts: names of the serializers that the consumer takes; empty from a producer.
        sequence: from a consumer, of the last message that it took; from a producer, of the last that it sent to this peer,
            or, where it sends again what a connection swallowed, of the last that it would not send again.
        shared_memory: its terms, unless it wants none.
        end: a random number that no other end has, and the name of its file (``endpoints.presence``).
        folder: a mark of the folder that this file is in; 0 where there is none.
        round: from a producer that sends again what a connection swallowed, by which of its connections it says so, from 1
            (from a binder always 1); from one that does not, 0. From a consumer, a number that grows with each time that it
            asks for that.
    """

    role: str
    identity: Identity
    window: _AtLeast1
    serializer: str = ""
    accepts: tuple[str, ...] = ()
    sequence: _AtLeast0 = 0
    shared_memory: SharedMemoryTerms | None = None
    end: _AtLeast0 = 0
    folder: _AtLeast0 = 0
    round: _AtLeast0 = 0


class Claimed(msgspec.Struct, frozen=True):
    """The queue that one that says HELLO has claimed: a part of ``SharedMemoryTerms``.

    Attributes:
        attached: as there.
    """

    attached: _AtLeast0 = 0


class Whereabouts(msgspec.Struct, frozen=True):
    """The part of a HELLO that tells where its end may be seen. To read the whole of one may take a hundred times as long.

    Attributes:
        end, folder, shared_memory: as in ``Hello``.
    """

    end: _AtLeast0 = 0
    folder: _AtLeast0 = 0
    shared_memory: Claimed | None = None


class Refusal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The binder does not take the connector in.

    Attributes:
        reason: a sentence for people, which names both sides of the disagreement.
    """

    reason: str


class Ending(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The body of GOODBYE: how an end ended.

    Attributes:
        failure: the type and text of the exception that ended it; "" if it ended well.
        origin: the end that raised it, in words, where another one passes it on; "" if it is this one's own.
        to: the end that the GOODBYE's sequence is about, where another may hear it in its place; 0: the one that hears it.
    """

    failure: str = ""
    origin: str = ""
    to: _AtLeast0 = 0


Control = TypeVar("Control", Hello, Refusal, Ending)

_DECODERS: dict[type, Any] = {kind: msgspec.msgpack.Decoder(kind) for kind in (Hello, Refusal, Ending)}
_whereabouts = msgspec.msgpack.Decoder(Whereabouts).decode
_encode = msgspec.msgpack.Encoder().encode
_BODIES = {Kind.PIECE: _PIECE.size}  # bytes, of the kinds whose bodies are not msgpack


def pack(kind: int, sequence: int, schema: bytes = b"", values: bytes = b"") -> bytes:
    """Frame 0's bytes, up to the packed payloads."""
    return PREFIX.pack(MAGIC, VERSION, kind, 0, sequence, len(schema), len(values)) + schema + values


def pack_control(kind: int, body: Hello | Refusal | Ending) -> bytes:
    """Frame 0's bytes of a control message that has a body.

    Raises:
        ValueError: it is longer than anybody reads: serializers were registered since the end that says it was made.
    """
    frame = pack(kind, 0, _encode(body))
    if len(frame) > MAX_CONTROL:
        raise ValueError(
            f"a {Kind.NAMES[kind]} of {len(frame)} bytes, the limit is {MAX_CONTROL}: name fewer serializers in accept="
        )
    return frame


def pack_refusal(reason: str) -> bytes:
    """Frame 0's bytes of a REFUSED. A long reason is cut."""
    return pack_control(Kind.REFUSED, Refusal(cut(reason, _MAX_REASON)))


def pack_goodbye(sequence: int, ending: Ending, to: int = 0) -> bytes:
    """Frame 0's bytes of a GOODBYE. See Ending."""
    ending = msgspec.structs.replace(ending, to=to) if to else ending
    return pack(Kind.GOODBYE, sequence, _encode(ending) if ending != Ending() else b"")


def ending_of(header: Header) -> Ending:
    """Return the ending that a GOODBYE tells, cut short, and without characters that a terminal would act upon.

    Raises:
        ProtocolError: the body is no ``Ending``.
    """
    return unpack_control(header, Ending) if header.schema else Ending()


def failed(text: str, origin: str = "") -> Ending:
    """Return the ending of an end that failed. A long text is cut, and so is what a terminal would act upon."""
    return Ending(cut(shown(text), _MAX_FAILURE), cut(shown(origin), _MAX_ORIGIN))


def cut(text: str, limit: int = _MAX_WHY_NOT) -> str:
    """Return a text of at most so many bytes, which ends in "…" if it was longer."""
    octets = text.encode(errors="replace")
    return text if len(octets) <= limit else octets[: limit - 3].decode(errors="ignore") + "…"


def names_size(names: Iterable[str]) -> int:
    """Return bytes that names of serializers take in a HELLO, at most; the limit is ``MAX_NAMES``."""
    return sum(len(name) + 2 for name in names)


def pack_piece(sequence: int, piece: Piece) -> bytes:
    """Frame 0's bytes of a PIECE."""
    return pack(Kind.PIECE, sequence, _PIECE.pack(*piece))


def piece_of(header: Header) -> Piece:
    """Return the body of a PIECE, unchecked."""
    return Piece(*_PIECE.unpack(header.schema))


def unpack(frame: memoryview) -> Header:
    """Take frame 0 apart.

    Args:
        frame: what arrived.

    Raises:
        VersionMismatch: another version of the format.
        ProtocolError: too short, too long, no magic, an unknown kind, lengths that do not add up.
    """
    size = len(frame)
    kind, sequence, schema, values = _prefix(frame)
    start = PREFIX.size + schema
    end = start + values
    limit = MAX_HEADER if kind == Kind.DATA else MAX_CONTROL
    if end > limit:
        raise ProtocolError(f"a {Kind.NAMES[kind]} header of {end} bytes, the limit is {limit}")
    if kind != Kind.DATA and (values or size != end) or _has_wrong_body(kind, schema):
        raise ProtocolError(f"a {Kind.NAMES[kind]} with {schema}, {values} and {size - end} bytes where it has none")
    if end > size:
        raise ProtocolError(
            f"a schema of {schema} and values of {values} bytes in a header with {size - PREFIX.size} left for them"
        )
    return Header(kind, sequence, bytes(frame[PREFIX.size : start]), frame[start:end], frame[end:])


def unpack_begin(frame: memoryview) -> Header:
    """Take the beginning of frame 0 apart: kind and sequence, and nothing else.

    Raises:
        VersionMismatch: another version of the format.
        ProtocolError: too short, no magic, an unknown kind.
    """
    kind, sequence, _, _ = _prefix(frame)
    return Header(kind, sequence, b"", frame[:0], frame[:0])


def _prefix(frame: memoryview) -> tuple[int, int, int, int]:
    """Return kind and sequence, and the lengths of schema and values."""
    if len(frame) < PREFIX.size:
        raise ProtocolError(f"a header of {len(frame)} bytes, the least is {PREFIX.size}")
    magic, version, kind, zero, sequence, schema, values = PREFIX.unpack_from(frame)
    if magic != MAGIC:
        raise ProtocolError(f"magic {magic!r}, expected {MAGIC!r}")
    if version != VERSION:
        raise VersionMismatch(f"the message is of wire version {version}, this process speaks version {VERSION}")
    if not Kind.HELLO <= kind <= Kind.PIECE or zero:
        raise ProtocolError(f"message kind {kind} (reserved bytes {zero}), known are 1 to {Kind.PIECE}")
    return kind, sequence, schema, values


def unpack_control(header: Header, kind: type[Control]) -> Control:
    """Return a control message's body. What of it will be repeated is cut.

    Raises:
        ProtocolError: it is none: a field missing, unknown, or of the wrong type.
    """
    try:
        body: Control = _DECODERS[kind].decode(header.schema)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"a {Kind.NAMES[header.kind]} that cannot be read: {error}") from None
    return cast(Control, _without_excess(body))


def whereabouts_in(frame: memoryview) -> Whereabouts | None:
    """Return what frame 0 of a HELLO says of where its end may be seen; None: it is none. The rest of it is not looked at.

    Raises:
        ProtocolError: it cannot be read.
    """
    if _prefix(frame)[0] != Kind.HELLO:
        return None
    try:
        return _whereabouts(unpack(frame).schema)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # the last: in what is passed over
        raise ProtocolError(f"a HELLO that cannot be read: {error}") from None


def _has_wrong_body(kind: int, size: int) -> bool:
    return kind in (Kind.CREDIT, Kind.PIECE) and size != _BODIES.get(kind, 0)


def _without_excess(body: Any) -> Any:
    if isinstance(body, Refusal):
        return Refusal(shown(body.reason))
    if isinstance(body, Ending):
        return replace(failed(body.failure, body.origin), to=body.to)
    who, terms = body.identity, body.shared_memory
    if not math.isfinite(who.started):
        raise ProtocolError(f"an end that says it started at {who.started}, which is no time")
    if terms is not None:
        terms = replace(terms, wish=shown(terms.wish), why_not=cut(shown(terms.why_not)))
    return replace(
        body,
        role=shown(body.role),
        identity=replace(who, host=cut(shown(who.host), _MAX_HOST), boot=cut(shown(who.boot), _MAX_BOOT)),
        serializer=shown(body.serializer),
        accepts=tuple(map(shown, body.accepts)),
        shared_memory=terms,
    )


def shown(text: str) -> str:
    """Return a text that may be shown on a terminal: whatever is no printable character is a question mark."""
    return text if text.isprintable() else "".join(each if each.isprintable() else "?" for each in text)
