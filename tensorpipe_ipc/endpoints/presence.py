"""Presence: how an end sees that another end on this host is open, and how it ended.

An open end over ipc or tcp keeps the user's runtime folder open, and a lock on one byte of it. (Linux locks bytes of a folder
as those of a file, whether or not they exist.) The end's *token* is a random number that HELLO tells, and the byte's number is
a hash of it. The kernel drops the lock when the end lets go of it, or when its process dies. HELLO also tells a mark of the
folder. A peer that has the same folder open asks the kernel for the lock. So it learns at once that the end is gone, whatever
happened to the connection, and whether or not the process lives on.

* No name says whether an end is open. A folder that was removed, or made anew, is still the folder of the ends that have it
  open, and no other folder gets its number meanwhile. An end that opens later has another folder.
* An end with another folder is *out of sight*: on another host, of another user or container, or from before a logout. Only its
  connection tells of it.
* No end locks another end's byte. So a process that looks at it, or is stopped there, changes nothing.

Each end has a file of its own in that folder, which tells how it ended::

    <token>.end     0600, and sticky, so that programs which clear away old files leave it

* While the end is open, the file holds what there is to tell people (``published_status``).
* A closing end overwrites that with how it ended, drops its lock, and removes the name, in this order. A peer that has the
  file open reads the ending there, even if the GOODBYE was lost with a connection. A killed end leaves no ending.
* Everybody may read in /proc/locks which bytes are locked. No token is learnt from that: a connector's token is a secret
  between it and its binders, by which they know it again.
* Any program that reaches a binder's port learns the binder's token. So a binder's token is looked up only for a peer that says
  WELCOME. A connector that names it is out of sight.
* The file is found by listing the folder, which belongs to this user alone, and by comparing names. No path leads out of it.
* The next end that opens or closes in the folder removes a killed end's file. An end has its lock before it has its file, and
  no token comes twice. So a file without a lock belongs to a dead end for good.
* A forked child closes its copy of the folder's descriptor, which would keep the lock.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import re
import weakref

import msgspec

from tensorpipe_ipc.errors import Refused
from tensorpipe_ipc.forks import no_fork, watch
from tensorpipe_ipc.memory.ofd_locks import is_locked, read_lock, unlock
from tensorpipe_ipc.owned_fd import OwnedFd, owned
from tensorpipe_ipc.process import identity
from tensorpipe_ipc.wire.header import Ending
from tensorpipe_ipc.zeromq.addresses import FILE_MODE, check_folder, runtime_folder

__all__ = ["SUFFIX", "LastWords", "Presence", "Sight", "is_binders", "sweep"]

SUFFIX = ".end"
_NAME = re.compile(r"([0-9a-f]{16})\.end")
_BINDS = 1 << 61  # of a token
_LONGEST = 1 << 16  # bytes of last words: some for each of the most peers that an end may have
_BYTES = 1 << 62  # a lock's place is a number of 63 bits
_READ_ONLY = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = _READ_ONLY | os.O_DIRECTORY
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class LastWords(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The words that a closing end writes into its file.

    Attributes:
        ending: how it ended.
        positions: for each peer that messages went to or came from in frames, by its token: the sequence of the last message
            that a producer sent it, or that a consumer took from it.
    """

    ending: Ending
    positions: dict[int, int] = {}


_decode = msgspec.msgpack.Decoder(LastWords).decode


class Presence:
    """An end's own.

    Attributes:
        token: the random number that it has for a name.
        folder: a mark of the folder that it is in; 0 where it is in none.
        why_not: why it is in none; "" if it is in one.
    """

    def __init__(self, *, binds: bool = False) -> None:
        """Nothing is opened yet."""
        self.token = int.from_bytes(os.urandom(8), "little") % _BINDS | 1 | _BINDS * binds
        self.folder = 0
        self.why_not = ""
        self._folder: OwnedFd | None = None
        self._file: OwnedFd | None = None
        self._has_said = False
        self._posted = b""

    def open(self) -> None:
        """Be seen from now on. May be cut short anywhere by an exception; then ``close`` leaves nothing of it."""
        try:
            self._lock(runtime_folder())
        except (OSError, Refused) as failed:
            self.let_go()
            self.why_not = str(failed)
        else:
            with contextlib.suppress(OSError):  # no room for it: then others do not learn how this end ended
                self._file = self._opened(self.token, _NEW)
                os.fchmod(self._file.fileno(), FILE_MODE)  # whatever the umask took from it
        if self._file is None:
            with contextlib.suppress(AttributeError, OSError):  # for what there is to tell people
                self._file = owned(os.memfd_create, f"tensorpipe_ipc{SUFFIX}", os.MFD_CLOEXEC)

    def _lock(self, folder: str) -> None:
        check_folder(os.path.join(folder, SUFFIX))
        watch(_drop_all)
        with no_fork():
            _open_here.add(self)
            self._folder = owned(os.open, folder, _FOLDER)
        found = os.fstat(self._folder.fileno())
        if not _is_ours(found) or not read_lock(self._folder.fileno(), _byte_of(self.token)):
            raise OSError(errno.EACCES, f"{folder} is another's by now, or locked by another program")
        sweep()
        self.folder = _mark_of(found)

    def publish(self, text: bytes) -> None:
        """Have the file say something, in the place of what it said, until the end closes."""
        if text != self._posted and self._file is not None and not self._has_said:
            with contextlib.suppress(OSError):  # no room for it: it is no reason to fail
                os.pwrite(self._file.fileno(), text, 0)
                self._posted = text

    def sees(self, token: int) -> bool:
        """Return whether another end in the same folder is open. Of one that is closed itself: True. Any thread may ask."""
        folder = self._folder  # which another thread may close at any moment, but for this
        return folder is None or is_locked(folder.fileno(), _byte_of(token))

    def sight_of(self, token: int, folder: int) -> Sight:
        """Look for another end.

        Args:
            token: that it told.
            folder: the mark that it told; 0 where it is in none.
        """
        if self.folder and folder == self.folder:
            return Sight(self, token)
        return Sight(
            why_not=self.why_not
            or ("it has another runtime folder" if folder else "it says that it has no runtime folder")
        )

    def file_of(self, token: int) -> OwnedFd | None:
        """Open the file of another end in the same folder, if it is there."""
        with contextlib.suppress(OSError):  # it was removed, or no descriptor is left: its last words are not heard
            if self._folder is None:
                return None
            # Listing duplicates a descriptor, and by the folder's own a child that another thread forks would keep the lock. It
            # does not wait for such a fork: an end may be collected where its thread has a lock that the fork waits for.
            anew = functools.partial(os.open, dir_fd=self._folder.fileno())
            with owned(anew, ".", _FOLDER) as folder:
                is_there = _name_of(token) in os.listdir(folder.fileno())
            return self._opened(token, _READ_ONLY | os.O_NONBLOCK) if is_there else None
        return None

    def _opened(self, token: int, flags: int) -> OwnedFd:
        assert self._folder is not None
        return owned(functools.partial(os.open, mode=0o600, dir_fd=self._folder.fileno()), _name_of(token), flags)

    def end(self, last_words: LastWords | None) -> None:
        """Write how the end ended, be seen no more, and remove the file. Again: what an exception left undone."""
        if self._folder is None:
            return
        if self._file is not None and last_words is not None and not self._has_said:
            text = msgspec.msgpack.encode(last_words)
            with contextlib.suppress(OSError):  # no room for it: then it looks like a killed end's
                os.pwrite(self._file.fileno(), text, 0)
                os.ftruncate(self._file.fileno(), len(text))  # after it: what it stands in is not given back before
            self._has_said = True
        unlock(self._folder.fileno(), _byte_of(self.token), 1)
        with contextlib.suppress(OSError):
            os.unlink(_name_of(self.token), dir_fd=self._folder.fileno())
        sweep()

    def close(self) -> None:
        """See others no more, and let go of all. Again: nothing."""
        self.end(None)
        self.let_go()

    def let_go(self) -> None:
        """Close the descriptors, as a forked child does with its copies."""
        self._folder = self._file = None


class Sight:
    """A peer's presence, as an end sees it.

    Attributes:
        why_not: why the peer is out of sight; "" if it is not.
    """

    __slots__ = ("_is_gone", "_own", "_token", "_words", "why_not")

    def __init__(
        self, own: Presence | None = None, token: int = 0, why_not: str = "it is in this very process"
    ) -> None:
        """
        Args:
            own: the presence of the end that looks, in whose folder the peer is; None: the peer is out of sight.
            token: that the peer told.
            why_not: why it is out of sight, if it is.
        """
        self._own, self._token = own, token
        self._is_gone = own is not None and not own.sees(token)
        self.why_not = why_not if own is None else ""
        # Of one that is not open nothing is looked for: to list a folder with many ends takes long, and strangers ask, too.
        self._words = own.file_of(token) if own is not None and not self._is_gone else None

    @property
    def is_out_of_sight(self) -> bool:
        """Return whether only the connection tells of the peer."""
        return self._own is None

    def is_gone(self) -> bool:
        """Return whether the peer is known to have closed, or to be dead."""
        if not self._is_gone and self._own is not None:
            self._is_gone = not self._own.sees(self._token)
        return self._is_gone

    def last_words(self) -> LastWords | None:
        """Return how a peer that is gone ended; None if it was killed, or its file was not seen in time."""
        if self._words is not None and self.is_gone():
            with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
                return _decode(os.pread(self._words.fileno(), _LONGEST, 0))
        return None

    def close(self) -> None:
        """Look no more. What was found out stays."""
        self._words = None


def sweep() -> None:
    """Remove the files of ends that were killed."""
    with contextlib.suppress(OSError), owned(os.open, runtime_folder(), _FOLDER) as opened:
        folder = opened.fileno()
        for name in os.listdir(folder) if _is_ours(os.fstat(folder)) else ():
            found = _NAME.fullmatch(name)
            if found and not is_locked(folder, _byte_of(int(found[1], 16))):
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=folder)


def is_binders(token: int) -> bool:
    """Return whether a token is that of an end that binds."""
    return token >= _BINDS


def _byte_of(token: int) -> int:
    """Return the number of the byte that the end with a token locks."""
    digest = hashlib.blake2b(token.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") % _BYTES


def _name_of(token: int) -> str:
    return f"{token:016x}{SUFFIX}"


def _mark_of(folder: os.stat_result) -> int:
    """Return a number that tells a folder that is open from all others of this and other hosts that are."""
    own = identity()
    text = f"{own.boot or own.host} {folder.st_dev} {folder.st_ino}"  # the numbers alone are one disk image's, on many hosts
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little") + 1


def _is_ours(found: os.stat_result) -> bool:
    return found.st_uid == os.geteuid() and not found.st_mode & 0o077


_open_here: weakref.WeakSet[Presence] = weakref.WeakSet()


def _drop_all() -> None:
    for presence in list(_open_here):
        presence.let_go()
