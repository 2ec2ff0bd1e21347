"""Presence: how the ends on one host see that another end is open, and how it ended.

An open end over ipc or tcp holds an OFD write lock on a file of its own in the user's runtime folder::

    <token>.end     0600; the token is random but for its highest bit, which an end that binds has; HELLO tells it

The kernel drops that lock when the end closes it, or when its process dies. A peer that finds the file opens it once, and keeps
it open. So it learns at once that the end is gone, whatever became of the connection, and whether or not the process lives on.

* While the end is open the file says what there is to tell people (``notice``).
* A closing end writes how it ended in the place of that, removes the name, and drops the lock, in this order. A peer that has
  the file open reads the ending there, also where the GOODBYE was lost with a connection. A killed end leaves no ending.
* HELLO also tells a mark of the folder. An end that names this very folder, and has no file in it, is gone. An end with another
  folder (of another host, user or container) is *out of sight*: only its connection tells of it.
* A binder's token anybody learns who reaches its port. So it is looked for only of one that says WELCOME: whoever connects
  and names it is out of sight.
* The file is found by listing the folder and comparing names. No path is made from what a peer said, and only files that are
  this user's alone are opened.
* Files of killed ends are removed by the next end that opens or closes in the folder. It takes the lock first. An end that has
  just made its file, and finds it removed before it could lock it, makes another.
* A forked child closes its copy of the descriptor, which would keep the lock.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import stat
import threading
import weakref

import msgspec

from tensorpipe_ipc.errors import Refused
from tensorpipe_ipc.memory.ofd_locks import is_locked, lock
from tensorpipe_ipc.owned_fd import OwnedFd, owned
from tensorpipe_ipc.process import identity
from tensorpipe_ipc.transport.addresses import check_folder, runtime_folder
from tensorpipe_ipc.wire.header import Ending

__all__ = ["SUFFIX", "LastWords", "Presence", "Sight", "is_binders", "sweep"]

SUFFIX = ".end"
_BINDS = 1 << 63  # of a token
_LONGEST = 1 << 16  # bytes of last words: some for each of the most peers that an end may have
_READ_ONLY = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


class LastWords(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a closing end writes into its file.

    Attributes:
        ending: how it ended.
        positions: for each peer that messages went to or came from in frames, by its token: the sequence of the last message
            that a producer sent it, or that a consumer took from it.
    """

    ending: Ending
    positions: dict[int, int] = {}


_decode = msgspec.msgpack.Decoder(LastWords).decode


class Presence:
    """An end's own file.

    Attributes:
        token: the random number that it has for a name.
        folder: a mark of the folder that it is in; 0 where there is no file.
        why_not: why there is no file; "" if there is one.
    """

    def __init__(self, *, binds: bool = False) -> None:
        self._binds = binds
        self.token = _token(binds)
        self.folder = 0
        self.why_not = ""
        self._path = ""
        self._file: OwnedFd | None = None
        self._posted = b""
        try:
            self._open(runtime_folder())
        except (OSError, Refused) as failed:
            self.close(None)
            self._path, self.folder, self.why_not = "", 0, str(failed)
            with contextlib.suppress(AttributeError, OSError), _forking:  # for what there is to tell people
                self._file = owned(os.memfd_create, f"tensorpipe_ipc{SUFFIX}", os.MFD_CLOEXEC)
                _open_here.add(self)

    def _open(self, folder: str) -> None:
        check_folder(os.path.join(folder, SUFFIX))
        sweep()
        with _forking:
            _watch_forks()
            _open_here.add(self)
            while not self._make(folder):
                self.token = _token(self._binds)
        self.folder = _mark_of(os.stat(folder))

    def _make(self, folder: str) -> bool:
        """Make and lock the file. Return False where it was taken for a killed end's before it was locked."""
        self._path = os.path.join(folder, _name_of(self.token))
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = file = owned(os.open, self._path, flags, 0o600)
        os.fchmod(file.fileno(), 0o600)  # whatever the umask took from it
        if lock(file.fileno(), 0, 1) and os.fstat(file.fileno()).st_nlink:
            return True
        self._file = None
        return False

    def post(self, text: bytes) -> None:
        """Have the file say something, in the place of what it said, until the end closes."""
        if text != self._posted and self._file is not None:
            with contextlib.suppress(OSError):  # no room for it: it is no reason to fail
                os.pwrite(self._file.fileno(), text, 0)
                self._posted = text

    def close(self, last_words: LastWords | None) -> None:
        """Write how the end ended, remove the file and drop the lock. Again: nothing."""
        file, self._file = self._file, None
        if file is None:
            return
        with file:
            with contextlib.suppress(OSError):  # no room for it: then it looks like a killed end's
                os.ftruncate(file.fileno(), 0)
                if last_words is not None:
                    os.pwrite(file.fileno(), msgspec.msgpack.encode(last_words), 0)
            _remove(self._path, file.fileno())
        sweep()

    def drop_in_child(self) -> None:
        """Let go of the lock's copy in a forked child."""
        self._file = None


class Sight:
    """What an end sees of a peer's presence.

    Attributes:
        why_not: why the peer is out of sight; "" if it is not.
    """

    __slots__ = ("_file", "_is_gone", "why_not")

    def __init__(self, token: int = 0, folder: int = 0, why_not: str = "it is in this very process") -> None:
        """
        Args:
            token: that the peer told.
            folder: the mark that it told; 0 where it has no file.
            why_not: why it has none, if it has none.
        """
        self._file: OwnedFd | None = None
        self._is_gone = False
        self.why_not = "" if folder else why_not
        if folder:
            try:
                self._look_for(token, folder)
            except OSError as failed:
                self.why_not = f"its file cannot be looked for: {failed.strerror}"

    def _look_for(self, token: int, mark: int) -> None:
        with owned(os.open, runtime_folder(), _READ_ONLY | os.O_DIRECTORY) as folder:
            found = os.fstat(folder.fileno())
            if _mark_of(found) != mark or not _is_ours(found):
                self.why_not = "it has another runtime folder"
                return
            wanted = _name_of(token)
            try:
                for name in os.listdir(folder.fileno()):
                    if name == wanted:
                        self._open(name, folder.fileno())
                        return
            except FileNotFoundError:  # removed since it was listed
                pass
            self._is_gone = True

    def _open(self, name: str, folder: int) -> None:
        file = owned(functools.partial(os.open, dir_fd=folder), name, _READ_ONLY | os.O_NONBLOCK)
        found = os.fstat(file.fileno())
        if stat.S_ISREG(found.st_mode) and _is_ours(found):
            self._file = file
        else:
            self.why_not = "its file is not this user's alone"

    @property
    def is_out_of_sight(self) -> bool:
        """Whether only the connection tells of the peer."""
        return bool(self.why_not)

    def is_gone(self) -> bool:
        """Whether the peer is known to have closed, or to be dead."""
        if not self._is_gone and self._file is not None:
            self._is_gone = not is_locked(self._file.fileno(), 0)
        return self._is_gone

    def last_words(self) -> LastWords | None:
        """Return how a peer that is gone ended; None if it was killed, or its file was not seen in time."""
        if self._file is not None and self.is_gone():
            with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
                return _decode(os.pread(self._file.fileno(), _LONGEST, 0))
        return None

    def close(self) -> None:
        """Look no more. What was found out stays."""
        self._file = None


def sweep() -> None:
    """Remove the files of ends that were killed."""
    with contextlib.suppress(OSError):
        folder = runtime_folder()
        for name in os.listdir(folder):
            if name.endswith(SUFFIX):
                _sweep(os.path.join(folder, name))


def _sweep(path: str) -> None:
    with contextlib.suppress(OSError):
        with owned(os.open, path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC) as file:
            found = os.fstat(file.fileno())
            if stat.S_ISREG(found.st_mode) and _is_ours(found) and lock(file.fileno(), 0, 1):
                _remove(path, file.fileno())


def _remove(path: str, descriptor: int) -> None:
    """Remove a name, if it still is that of an open file."""
    with contextlib.suppress(OSError):
        if os.path.samestat(os.lstat(path), os.fstat(descriptor)):
            os.unlink(path)


def _token(binds: bool) -> int:
    return int.from_bytes(os.urandom(8), "little") % _BINDS | 1 | _BINDS * binds


def is_binders(token: int) -> bool:
    """Return whether a token is that of an end that binds."""
    return token >= _BINDS


def _name_of(token: int) -> str:
    return f"{token:016x}{SUFFIX}"


def _mark_of(folder: os.stat_result) -> int:
    """A number that tells a folder from all others of this and other hosts."""
    text = f"{identity().boot} {folder.st_dev} {folder.st_ino}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little") + 1


def _is_ours(found: os.stat_result) -> bool:
    return found.st_uid == os.geteuid() and not found.st_mode & 0o077


# A fork must not fall between the moments when a descriptor is opened and when it is known here: the child would keep
# the lock. So forks wait while an end makes its file.
_forking = threading.RLock()
_open_here: weakref.WeakSet[Presence] = weakref.WeakSet()
_hooked: list[bool] = []


def _watch_forks() -> None:
    if not _hooked:
        _hooked.append(True)
        # In C: an exception of a signal's handler within would keep all other threads from forking for good.
        os.register_at_fork(before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_forking.release)
        os.register_at_fork(after_in_child=_drop_all)


def _drop_all() -> None:
    for presence in list(_open_here):
        presence.drop_in_child()
