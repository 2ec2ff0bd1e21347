"""Curve: which keys an end has, and whose it lets in. Keys lie in files; nothing else ever holds them in words.

A key pair is two files in the format of ``zmq.auth``'s certificates, which any ZeroMQ program reads. ``NAME.key`` (0644)
holds the public key, and is handed out; ``NAME.key_secret`` (0600) holds both, and stays where it was made::

    curve
        public-key = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
        secret-key = "JTKVSB%%)wK0E.X)V>+}o?pNmC{O&4W4b!Ni{Lh6"

Both are 32 bytes in Z85, 40 characters. The files are read when an end is opened, and what was read goes to ZeroMQ. An end that
connects keeps it in its own memory, too, for the connections to come. A file that others may have read (a secret) or written (a
public key that is trusted) is refused. One that is named by itself belongs in a folder where others can put none in its place.
"""

from __future__ import annotations

import os
import re
import stat
import string
from collections.abc import Iterable
from operator import mul
from pathlib import Path
from typing import Any, NoReturn

from tensorpipe_ipc.errors import Refused
from tensorpipe_ipc.owned_fd import owned

__all__ = ["PUBLIC", "SECRET", "Curve", "write_key_pair"]

PUBLIC, SECRET = ".key", ".key_secret"  # how the names of the files end
_LARGEST = 1 << 14  # bytes of a key file: one of ours has some 300
_KEY = re.compile(r"[!-~]{40}")
_LINE = re.compile(r'\s*(public|secret)-key\s*=\s*"([!-~]{40})"\s*')
_Z85 = string.digits + string.ascii_letters + ".-:+=^!/*?&<>()[]{}@%$#"
_PLACES = [85**place for place in (4, 3, 2, 1, 0)]
_TRUST = {0}  # whose files are trusted beside one's own: root may change them anyway


class Curve:
    """Keys for both ways: what goes over the connection is encrypted, and each end knows that the other has the right key.

    The end that binds needs ``clients``, the end that connects needs ``server``::

        tp.Consumer("tcp://*:5555", security=tp.Curve("gpu.key_secret", clients=["camera.key"]))
        tp.Producer("tcp://gpu:5555", security=tp.Curve("camera.key_secret", server="gpu.key"))

    ``tensorpipe-ipc keygen NAME`` makes a pair of files. A ``Curve`` holds their paths and no key. It is not pickled: the
    process that opens an end makes it from the paths.
    """

    def __init__(
        self,
        secret: str | os.PathLike[str],
        *,
        server: str | os.PathLike[str] | None = None,
        clients: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None = None,
    ) -> None:
        """Name the files. They are read when an end is opened.

        Args:
            secret: this end's own, ``NAME.key_secret``.
            server: the public key of the end that binds, ``NAME.key``.
            clients: the public keys of those that may connect: files, or a folder of which every ``*.key`` counts, hidden
                ones, too. The end lets in who was listed when it was opened.

        Raises:
            TypeError: something else than paths.
            ValueError: neither ``server`` nor ``clients``, or a key in the place of its file's path.
        """
        if server is None and clients is None:
            raise ValueError(
                "Curve with neither server= (for the end that connects) nor clients= (for the end that binds): who is "
                "the other side?"
            )
        self._secret = _path(secret)
        self._server = None if server is None else _path(server)
        self._clients: str | tuple[str, ...] | None
        if clients is None:
            self._clients = None
        elif isinstance(clients, (str, os.PathLike)):
            self._clients = _path(clients)
        else:
            self._clients = tuple(map(_path, clients))

    def own_keys(self) -> tuple[bytes, bytes]:
        """This end's public and secret key, in Z85.

        Raises:
            Refused: the file is not there, is no key file, or others may read it.
        """
        found = _read(self._secret)
        if "secret" not in found and "public" in found:
            raise Refused(
                f"{self._secret} holds a public key where the secret one is wanted: name the {SECRET} file beside it"
            )
        if "secret" not in found or "public" not in found:
            raise Refused(f"{self._secret} holds no key pair: it must be a {SECRET} file of `tensorpipe-ipc keygen`")
        return found["public"], found["secret"]

    def server_key(self) -> bytes:
        """Return the public key of the end that binds, in Z85.

        Raises:
            ValueError: none was named.
            Refused: the file is not there, is no key file, or others may write to it.
        """
        if self._server is None:
            raise ValueError(
                "security without server=: an end that connects needs the public key of the one that binds"
            )
        return _public(self._server)

    def client_keys(self) -> frozenset[bytes]:
        """Return the public keys of those that may connect, in Z85.

        Raises:
            ValueError: none were named.
            Refused: a file is not there, is no key file, or others may write to it; or there is no file at all.
        """
        if self._clients is None:
            raise ValueError(
                "security without clients=: an end that binds needs the public keys of those that may connect; "
                "without such a list ZeroMQ lets in anybody"
            )
        files: Iterable[str] = self._clients if isinstance(self._clients, tuple) else (self._clients,)
        if isinstance(self._clients, str) and os.path.isdir(self._clients):
            _check_owner(self._clients, os.stat(self._clients))
            _check_mode(self._clients, os.stat(self._clients))
            files = map(str, sorted(Path(self._clients).glob(f"*{PUBLIC}")))
        keys = frozenset(map(_public, files))
        if not keys:
            raise Refused(f"clients={self._clients!r} lists no key, so nobody could connect: put a {PUBLIC} file there")
        return keys

    def __repr__(self) -> str:
        return f"<Curve secret={self._secret!r} server={self._server!r} clients={self._clients!r}>"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        del protocol
        raise TypeError("Curve is not pickled: hand on the paths, and make it where the end is opened")


def write_key_pair(name: str, public: bytes, secret: bytes) -> tuple[str, str]:
    """Write a key pair's two files, whatever the umask is.

    Args:
        name: where, without the ending.
        public: the public key, in Z85.
        secret: the secret key, in Z85.

    Returns:
        The paths of the public and of the secret file.

    Raises:
        Refused: one of them is there already (it stays as it is), or cannot be written.
        ValueError: nothing of ``name`` is left for the files' own names.
    """
    if not os.path.basename(name):
        raise ValueError(f"name {name!r}: the files need one of their own, as in keys/robot")
    paths = name + PUBLIC, name + SECRET
    about = b"# ZeroMQ CURVE %s, made by tensorpipe-ipc keygen\n# %s\n\nmetadata\ncurve\n"
    lines = b'    public-key = "%s"\n' % public, b'    secret-key = "%s"\n' % secret
    texts = (
        about % (b"public key", b"To be handed to those who are to trust the holder of the secret key.") + lines[0],
        about % (b"key pair", b"SECRET: not for others to read, and not to leave this place.") + lines[0] + lines[1],
    )
    made: list[str] = []
    try:
        for path, text, mode in zip(paths, texts, (0o644, 0o600), strict=True):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            made.append(path)
            with open(descriptor, "wb") as file:
                os.fchmod(descriptor, mode)
                file.write(text)
    except BaseException as failed:
        for path in made:
            os.unlink(path)
        if isinstance(failed, FileExistsError):
            raise Refused(f"{failed.filename} exists: keys are never overwritten; take another name") from None
        if isinstance(failed, OSError):
            raise Refused(f"{name}{SECRET} cannot be written: {failed.strerror}") from None
        raise
    return paths


def _path(given: object) -> str:
    path = os.fspath(given) if isinstance(given, os.PathLike) else given
    if not isinstance(path, str):
        raise TypeError(f"a {type(given).__name__} where the path of a key file belongs")
    words = re.split(r"[\s'\"]+", path)  # a key as it stands in its file, or was read from there
    if any(map(_KEY.fullmatch, words)) and not path.endswith((PUBLIC, SECRET)) and not os.path.lexists(path):
        raise ValueError(
            "no file has that name, and it looks like the key itself, where the path of its file belongs; "
            "make the file with `tensorpipe-ipc keygen`"
        )
    return path


def _public(path: str) -> bytes:
    found = _read(path)
    if "secret" in found:
        raise Refused(f"{path} holds a secret key where a public one is wanted: name the {PUBLIC} file beside it")
    if "public" not in found:
        raise Refused(f"{path} holds no public key: it must be a {PUBLIC} file of `tensorpipe-ipc keygen`")
    return found["public"]


def _read(path: str) -> dict[str, bytes]:
    """Return the keys in a file, by kind. Its text is in no error. One with a secret key must be closed to others."""
    try:
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe in its place must not stop us
        with owned(os.open, path, flags) as file:
            status = os.fstat(file.fileno())
            _check_owner(path, status)
            text = os.read(file.fileno(), _LARGEST + 1).decode("ascii", "replace")
    except OSError as failed:
        if isinstance(failed, Refused):
            raise
        raise Refused(f"the key file {path} cannot be read: {failed.strerror}") from None
    if len(text) > _LARGEST:
        raise Refused(f"{path} has over {_LARGEST:,} bytes, so it is no key file")
    found: dict[str, bytes] = {}
    for line in text.splitlines():
        if match := _LINE.fullmatch(line):
            if match[1] in found:
                raise Refused(f"{path} holds more than one {match[1]} key")
            if not _is_z85(match[2]):
                raise Refused(
                    f"{path} holds a {match[1]} key that is none: make a new pair with `tensorpipe-ipc keygen`"
                )
            found[match[1]] = match[2].encode()
    if "secret" in found and (mode := stat.S_IMODE(status.st_mode)) & 0o077:
        raise Refused(
            f"the secret key {path} has mode {mode:04o}, so others may have read it: make a new pair, or, if nobody has, "
            f"chmod 600 {path}"
        )
    _check_mode(path, status)
    return found


def _is_z85(key: str) -> bool:
    """Return whether each five characters are a number of 32 bits."""
    digits = [_Z85.find(each) for each in key]
    numbers = (sum(map(mul, digits[at : at + 5], _PLACES)) for at in range(0, len(key), 5))
    return -1 not in digits and max(numbers) < 1 << 32


def _check_owner(path: str, found: os.stat_result) -> None:
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise Refused(f"{path} is neither a file nor a folder of keys")
    if found.st_uid not in _TRUST | {os.geteuid()}:
        raise Refused(f"{path} belongs to uid {found.st_uid}; keys must be yours (uid {os.geteuid()}) or root's")


def _check_mode(path: str, found: os.stat_result) -> None:
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o022:
        raise Refused(f"{path} has mode {mode:04o}, so others may put keys there: chmod go-w {path}")
