"""Endpoints as people write them, and whether an address is safe to use.

``ipc:///path``, ``tcp://host:port``, ``inproc://name``, or a bare name (``frames``), which is an ipc path in the user's
runtime folder. What is checked here: syntax, the length of a path, that tcp stays on this host where there are no keys, and
that nobody but this user can have put a socket where we look for one.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import stat
from typing import NamedTuple

from tensorpipe_ipc.errors import Refused

__all__ = [
    "FILE_MODE",
    "Address",
    "check_chain",
    "check_folder",
    "check_socket_file",
    "is_shared",
    "parse",
    "runtime_folder",
]

# The mode of files in the runtime folder. What is sticky is left there by those who clear away old files, as systemd does (XDG
# Base Directory Specification).
FILE_MODE = 0o1600
_MOST_LINKS = 40
_TEMPORARY = ("/tmp", "/var/tmp", "/usr/tmp")  # as tempfile has them
# Root's on any system (Filesystem Hierarchy Standard). In a user namespace that does not map root, its folders and those of all
# other users that are not mapped have one owner, who has / too: only by their paths are root's known.
_SYSTEM = frozenset(
    ("/", "/dev", "/dev/shm", "/home", "/mnt", "/opt", "/run", "/run/user", "/srv", "/tmp", "/usr", "/usr/tmp", "/var")
    + ("/var/home", "/var/run", "/var/tmp")
)
PATH_LIMIT = 107  # bytes: sun_path holds 108 with its final zero

_HOST = re.compile(r"\*|[A-Za-z0-9_.-]+|[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]+)?")
_OWN = ("tensorpipe_ipc.", "zeromq.")  # names by inproc of sockets between this library's parts, and ZeroMQ's
_BARE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class Address(NamedTuple):
    """An endpoint, taken apart."""

    scheme: str  # "ipc", "tcp" or "inproc"
    text: str  # in full, as ZeroMQ takes it
    path: str = ""  # of an ipc socket
    is_remote: bool = False  # whether other hosts come into it

    @property
    def has_name(self) -> bool:
        """Return whether a host has to be found by its name."""
        host = self.text.rpartition(":")[0].removeprefix("tcp://")
        return self.scheme == "tcp" and host != "*" and not _is_number(host.strip("[]"))


def parse(endpoint: str, *, has_keys: bool = False) -> Address:
    """Take an endpoint apart.

    Args:
        endpoint: as people write it.
        has_keys: whether the end has CURVE keys.

    Raises:
        ValueError: no endpoint, or an ipc path that is too long, or keys where nothing leaves the process.
        Refused: a tcp address other than this host's loopback, without keys.
    """
    if not isinstance(endpoint, str):
        raise TypeError(f"endpoint {endpoint!r} is a {type(endpoint).__name__}, not a str")
    scheme, separator, rest = endpoint.partition("://")
    if not separator and _BARE.fullmatch(endpoint):
        return _ipc(os.path.join(runtime_folder(), endpoint + ".sock"))
    if scheme == "ipc" and rest and "\0" not in rest and rest[0] not in "@*":
        return _ipc(os.path.abspath(rest))
    if scheme == "inproc" and rest.startswith(_OWN):
        raise ValueError(f"endpoint {endpoint!r}: names that begin with {' or '.join(_OWN)} are the libraries' own")
    if scheme == "inproc" and rest and len(rest) <= 255:
        if has_keys:
            raise ValueError(
                f"endpoint {endpoint!r} stays within this process, where keys do nothing: leave security out"
            )
        return Address("inproc", endpoint)
    if scheme == "tcp":
        return _tcp(endpoint, rest, has_keys)
    raise ValueError(
        f"endpoint {endpoint!r}: write ipc:///path, tcp://host:port, inproc://name, or a bare name of letters, digits, "
        "'_', '-' and '.'"
    )


def runtime_folder() -> str:
    """Return where the sockets of bare names are: ``$XDG_RUNTIME_DIR/tensorpipe_ipc``, or a folder of this user's in the
    first folder for temporary files that may be written to: ``$TMPDIR``, ``$TEMP``, ``$TMP``, /tmp, /var/tmp, /usr/tmp.

    ``tempfile`` is not asked: it holds a lock, which a child that is forked meanwhile, or a signal's handler, would wait for.

    Raises:
        Refused: none of them is there.
    """
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    if _is_folder(base):
        return os.path.join(base, "tensorpipe_ipc")
    for base in (*(os.environ.get(name, "") for name in ("TMPDIR", "TEMP", "TMP")), *_TEMPORARY):
        if _is_folder(base) and os.access(base, os.W_OK | os.X_OK):
            return os.path.join(base, f"tensorpipe_ipc-{os.geteuid()}")
    raise Refused(
        f"no folder for the runtime folder of this user: none of {', '.join(_TEMPORARY)} may be written to; set "
        "XDG_RUNTIME_DIR, or TMPDIR, to one that you may write to"
    )


def _is_folder(path: str) -> bool:
    return bool(path) and os.path.isabs(path) and os.path.isdir(path) and _is_utf8(path)


def check_folder(path: str) -> None:
    """See that nobody else can replace the folder of ``path``, or what this user has put there. The runtime folder is made
    (0700) if there is none.

    The runtime folder must be this user's alone. Any other may be read by others. It and all above it, up to /, must be root's
    or this user's, and not for others to write to (but for sticky ones like /tmp, where they cannot touch what is not theirs).

    Raises:
        Refused: there is no such folder, or it is a symbolic link, or one of them is another user's, or open to others.
    """
    folder = os.path.dirname(path)
    is_runtime = folder == runtime_folder()
    if is_runtime:
        _make(folder)
    try:
        found = os.lstat(folder)
    except (FileNotFoundError, NotADirectoryError):
        raise Refused(
            f"there is no folder {folder}: make it (mkdir -p -m 700), or use a bare name as endpoint"
        ) from None
    if not stat.S_ISDIR(found.st_mode):
        raise Refused(f"{folder} is no folder of its own (a symbolic link or a file); remove it or use another path")
    if is_runtime and (found.st_uid != os.geteuid() or found.st_mode & 0o077):
        raise Refused(
            f"{folder} belongs to uid {found.st_uid} with mode {stat.S_IMODE(found.st_mode):04o}; it must be "
            f"yours (uid {os.geteuid()}) with mode 0700: remove it, chmod 700, or set XDG_RUNTIME_DIR to another folder"
        )
    check_chain(folder)


def is_shared(folder: str) -> bool:
    """Return whether other users may put something into a folder."""
    return bool(os.lstat(folder).st_mode & 0o022)


def check_chain(path: str, links: int = 0) -> None:
    """See that nobody else can replace a folder on the way to ``path``, or a link that leads there. No link of another user's
    is followed.

    Args:
        links: how many led there.

    Raises:
        Refused: another user can.
        OSError: there is no such folder, or this user may not look there.
    """
    if links > _MOST_LINKS:
        raise Refused(f"{path} leads through more than {_MOST_LINKS} symbolic links")
    top, prefix = os.lstat("/").st_uid, "/"
    for name in ["", *filter(None, path.split("/"))]:
        prefix = os.path.join(prefix, name)
        found = os.lstat(prefix)
        is_link = stat.S_ISLNK(found.st_mode)
        is_open = not is_link and bool(found.st_mode & 0o022)
        is_known = found.st_uid in {0, os.geteuid()} or (found.st_uid == top and _place_of(prefix) in _SYSTEM)
        if not is_known or (is_open and not found.st_mode & stat.S_ISVTX):
            raise Refused(
                f"{prefix} (uid {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}) lets others put a socket "
                + ("there" if prefix == path else f"into {path}")
                + "; use a folder of your own, or a bare name"
            )
        if is_link:
            check_chain(os.path.join(os.path.dirname(prefix), os.readlink(prefix)), links + 1)


def _place_of(path: str) -> str:
    """Return where a folder or a link lies: by whatever links one gets there, but for itself."""
    folder, name = os.path.split(path)
    return os.path.normpath(os.path.join(os.path.realpath(folder), name))


def check_socket_file(path: str) -> bool:
    """Return whether there is a socket at ``path`` that this user made.

    Raises:
        Refused: there is something else: a symbolic link, a file, another user's socket.
    """
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return False
    if not stat.S_ISSOCK(found.st_mode):
        raise Refused(f"{path} exists and is no socket (mode {found.st_mode:06o}); remove it, or use another path")
    if found.st_uid != os.geteuid():
        raise Refused(f"{path} is a socket of uid {found.st_uid}, not of uid {os.geteuid()}; use another path")
    return True


def _make(folder: str) -> None:
    if os.path.lexists(folder):
        return
    check_chain(os.path.dirname(folder))  # first: who can put a link in its place has its target's mode changed
    try:
        with contextlib.suppress(FileExistsError):  # somebody else was as quick; it is looked at next
            os.mkdir(folder, 0o700)
            os.chmod(folder, 0o700)  # whatever the umask took from it
    except OSError as error:
        raise Refused(
            f"the runtime folder {folder} cannot be made: {error.strerror}; set XDG_RUNTIME_DIR, or TMPDIR, "
            "to one that you may write to"
        ) from None


def _is_utf8(path: str) -> bool:
    return path.encode(errors="ignore").decode() == path


def _ipc(path: str) -> Address:
    if not _is_utf8(path):  # pyzmq takes no other
        raise ValueError(f"ipc path {path!r} is no UTF-8: use another")
    length = len(os.fsencode(path))
    if length > PATH_LIMIT:
        raise ValueError(f"ipc path {path!r} has {length} bytes, the kernel's limit is {PATH_LIMIT}: use a shorter one")
    return Address("ipc", f"ipc://{path}", path)


def _tcp(endpoint: str, rest: str, has_keys: bool) -> Address:
    host, separator, port = rest.rpartition(":")
    if not separator or not host or not (port == "*" or (port.isascii() and port.isdigit() and int(port) <= 0xFFFF)):
        raise ValueError(
            f"endpoint {endpoint!r}: write tcp://host:port with a port of 0 to 65535, or * for any free one"
        )
    host = host.strip("[]")
    port = "*" if port == "*" or not int(port) else str(int(port))
    is_remote = not _is_loopback(host)
    if is_remote and not has_keys:
        raise Refused(
            f"{endpoint}: tcp leaves this host (127.0.0.1, ::1, localhost) only with keys on both sides: make them with "
            "`tensorpipe-ipc keygen NAME` and give security=tensorpipe_ipc.Curve(...)"
        )
    if not _HOST.fullmatch(host):  # also of loopback: behind a scope (::1%lo) libzmq would take a second address
        raise ValueError(
            f"endpoint {endpoint!r}: write tcp://host:port with a host's name or number, or * for all here"
        )
    host = "127.0.0.1" if host == "localhost" else f"[{host}]" if ":" in host else host
    return Address("tcp", f"tcp://{host}:{port}", is_remote=is_remote)


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # another name may mean anything, and something else tomorrow
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
