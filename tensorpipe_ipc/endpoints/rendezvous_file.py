"""The rendezvous file: it tells connectors which queues a binder has ready, and where. Shared memory is found through it alone.

No number that came over a socket is opened, as any program that can reach a port could name any number. What is opened stands
in a file that only this user can have written. The file also helps where the binder does not answer: the library has no thread,
so while the binder's program computes, it answers no HELLO. So each binder that can share memory keeps a file in the user's
runtime folder, under a name made from its address, for as long as it has the address::

    magic TPIR | u32 version | u32 crc32 of the rest | u32 n | msgpack (n bytes): where, its HELLO, the queues it offers

``greeting`` tells what a connector does with it. A file that is missing, or breaks any rule, is passed over. Then the two ends
greet each other, and use frames if there is still no good file.

* The folder and the file belong to this user and to nobody else (0700 and 0600, whatever the umask), and neither is a symbolic
  link.
* A living process wrote the file for the very socket that is at the address now: place, pid, start time, pid namespace and boot
  id are compared. After a WELCOME, it must be the file of the end that said so, by that end's random number, whatever the
  address is there. With keys, it must be the file of a binder that has the very key which the peer has shown.
* The file is removed when its binder closes. The next binder in the folder removes a killed binder's file.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import struct
import zlib
from typing import Annotated

import msgspec

from tensorpipe_ipc.errors import Refused
from tensorpipe_ipc.owned_fd import OwnedFd, owned
from tensorpipe_ipc.process import Identity, identity, is_alive
from tensorpipe_ipc.wire.header import VERSION, Hello
from tensorpipe_ipc.zeromq.address_claim import private_to_us
from tensorpipe_ipc.zeromq.addresses import FILE_MODE, Address, check_folder, runtime_folder

__all__ = [
    "LIMIT",
    "QueueOffer",
    "Rendezvous",
    "RendezvousFile",
    "contents",
    "find",
    "packed",
    "path_of",
    "read",
    "sweep",
    "unpacked",
]

LIMIT = 1 << 13  # bytes: a HELLO and some offers need 700
_SUFFIX = ".rendezvous"
_HEAD = struct.Struct("<4sIII")
_MAGIC = b"TPIR"
_TRIES = 3  # of reading what is just being written anew
_READ_ONLY = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_AtLeast0 = Annotated[int, msgspec.Meta(ge=0)]
_AtLeast1 = Annotated[int, msgspec.Meta(ge=1)]


class QueueOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A queue in a binder's shared memory, as far as its connector must know it to take part (``endpoints.rendezvous``).

    Attributes:
        token: a random number that no other offer has; the queue's record in shared memory says it, too.
        number: the queue's.
        maxsize: how many messages may be in it.
        segment, tickets, credits: descriptor in the binder's process, and inode, of the memory and of the two pipes.
    """

    token: _AtLeast1
    number: _AtLeast1
    maxsize: _AtLeast1
    segment: tuple[_AtLeast0, _AtLeast0]
    tickets: tuple[_AtLeast0, _AtLeast0]
    credits: tuple[_AtLeast0, _AtLeast0]


class Rendezvous(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of the file.

    Attributes:
        name: the file's own: one that was copied to another address is not that address's.
        place: device and inode of the socket file of an ipc address; of the network namespace that a tcp address is in.
        key: the binder's public key, in Z85; "" without keys.
        hello: what the binder says of itself to everybody.
        offers: queues that it has made for connectors to come; each is for one of them.
    """

    name: str
    place: tuple[int, int]
    key: str
    hello: Hello
    offers: tuple[QueueOffer, ...]


_decode = msgspec.msgpack.Decoder(Rendezvous).decode


class RendezvousFile:
    """A binder's own."""

    def __init__(self, address: Address, key: str) -> None:
        """Nothing is made yet.

        Args:
            address: the binder's.
            key: its public key; "" without keys.
        """
        self._path, self._address, self._key = path_of(address), address, key
        self._place = (0, 0)
        self._owned: OwnedFd | None = None

    def open(self, hello: Hello) -> None:
        """Make it. It offers nothing yet. May be cut short anywhere by an exception; then ``close`` leaves nothing of it.

        Raises:
            Refused: the runtime folder is not safe.
            OSError: it cannot be made.
        """
        self._place = _place_of(self._address)
        check_folder(self._path)
        with private_to_us(self._path):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)  # the address is ours, so nobody else's file is of any use
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            try:
                self._owned = owned(os.open, self._path, flags, 0o600)
                os.fchmod(self._owned.fileno(), FILE_MODE)  # whatever the umask took from it
                self.write(hello, ())  # while nobody sweeps: so what they find empty is a dead one's
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path)
                raise

    def write(self, hello: Hello, offers: tuple[QueueOffer, ...]) -> None:
        """Say something new.

        Raises:
            OSError: there is no room for it.
        """
        assert self._owned is not None
        name = os.path.basename(self._path)
        os.pwrite(self._owned.fileno(), packed(Rendezvous(name, self._place, self._key, hello, offers)), 0)

    def close(self) -> None:
        """Take it away. Again: what an exception left undone."""
        if self._owned is None:
            return
        with contextlib.suppress(OSError, Refused), private_to_us(self._path):
            if os.path.samestat(os.lstat(self._path), os.fstat(self._owned.fileno())):
                os.unlink(self._path)
        self._owned = None


def path_of(address: Address) -> str:
    """Return where the file of whoever has an address is."""
    name = hashlib.blake2b(os.fsencode(address.text), digest_size=12).hexdigest()
    return os.path.join(runtime_folder(), name + _SUFFIX)


def read(address: Address) -> Rendezvous | None:
    """Return what the binder of an address has written down; None if there is nothing that can be relied on."""
    with contextlib.suppress(OSError):
        found = _of_its_name(path_of(address))
        if found is not None and found.place == _place_of(address) and _lives(found.hello.identity):
            return found
    return None


def find(address: Address, end: int, key: str, *, anywhere: bool) -> Rendezvous | None:
    """Read what the binder that said it is ``end`` has written down.

    Args:
        address: what it was reached by.
        end: the number that it gave.
        key: the public key that it has shown; "" without keys.
        anywhere: also one that has another address here, and is reached by a path of another name, or from another host's name.
            Only of a binder that is known to be who it says: else it could name any that its connector's user has open.
    """
    found = read(address)
    if found is not None and (found.hello.end, found.key) == (end, key):
        return found
    if not anywhere:
        return None
    with contextlib.suppress(OSError):
        for path in _all():
            with contextlib.suppress(OSError):
                found = _of_its_name(path)
                if found is not None and (found.hello.end, found.key) == (end, key) and _lives(found.hello.identity):
                    return found
    return None


def contents(path: str) -> Rendezvous | None:
    """Return what a rendezvous file says, whoever wrote it; None if it says nothing, or others may have written to it.

    Raises:
        OSError: it cannot be opened, or is a symbolic link.
    """
    text = _text(path)
    for _ in range(_TRIES - 1):
        if unpacked(text) is not None:
            break
        text = _text(path)
    return unpacked(text)


def _of_its_name(path: str) -> Rendezvous | None:
    found = contents(path)
    return found if found is not None and found.name == os.path.basename(path) else None


def sweep() -> None:
    """Remove what binders left that are dead."""
    with contextlib.suppress(OSError):
        for path in _all():
            _sweep(path)


def _all() -> list[str]:
    """Return the paths of all in the runtime folder, if that is ours: another's may have any number of names, or lead
    elsewhere."""
    path = runtime_folder()
    with owned(os.open, path, _READ_ONLY | os.O_DIRECTORY) as folder:
        names = os.listdir(folder.fileno()) if _is_ours(os.fstat(folder.fileno())) else ()
    return [os.path.join(path, name) for name in names if name.endswith(_SUFFIX)]


def _sweep(path: str) -> None:
    with contextlib.suppress(OSError, Refused):
        if _is_left(path):
            with private_to_us(path):
                if _is_left(path):  # and not another binder's by now
                    os.unlink(path)


def _is_left(path: str) -> bool:
    found = contents(path)
    return os.lstat(path).st_size == 0 if found is None else _is_dead(found.hello.identity)


def packed(rendezvous: Rendezvous) -> bytes:
    """Return the file's bytes."""
    text = msgspec.msgpack.encode(rendezvous)
    return _HEAD.pack(_MAGIC, VERSION, zlib.crc32(text), len(text)) + text


def unpacked(data: bytes) -> Rendezvous | None:
    """Return what bytes of a file say; None if that is nothing, or of another version. Whoever wrote them may be anybody."""
    if not _HEAD.size <= len(data) <= LIMIT:
        return None
    magic, version, crc, length = _HEAD.unpack_from(data)
    text = data[_HEAD.size : _HEAD.size + length]
    if (magic, version) != (_MAGIC, VERSION) or zlib.crc32(text) != crc:
        return None
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        return _decode(text)
    return None


def _text(path: str) -> bytes:
    """Return a file's bytes, if it and its folder are ours alone, and not more of them than there may be; else nothing."""
    with owned(os.open, os.path.dirname(path), _READ_ONLY | os.O_DIRECTORY) as folder:
        if not _is_ours(os.fstat(folder.fileno())):
            return b""
        opens = functools.partial(os.open, dir_fd=folder.fileno())
        with owned(opens, os.path.basename(path), _READ_ONLY | os.O_NONBLOCK) as file:
            return os.pread(file.fileno(), LIMIT + 1, 0) if _is_ours(os.fstat(file.fileno())) else b""


def _is_ours(found: os.stat_result) -> bool:
    return found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _place_of(address: Address) -> tuple[int, int]:
    found = os.stat(address.path or "/proc/self/ns/net", follow_symlinks=not address.path)
    return found.st_dev, found.st_ino


def _lives(process: Identity) -> bool:
    """Return whether a process is seen to live, from here."""
    return process.same_namespace(identity()) and is_alive(process)


def _is_dead(process: Identity) -> bool:
    """Return whether a process is seen to be dead, or was one of this host's before it was last started."""
    own = identity()
    boots = process.boot.split()[:1], own.boot.split()[:1]  # without the time namespace
    return not is_alive(process) or (process.host == own.host and bool(own.boot) and boots[0] != boots[1])
