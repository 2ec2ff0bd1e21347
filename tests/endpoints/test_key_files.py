"""Key files: made privately whatever the umask, never overwritten, and refused where others may have read or written them."""

from __future__ import annotations

import copy
import os
import pickle
import stat
from pathlib import Path
from typing import Any

import pytest
import zmq.auth
from secured import PUBLIC, SECRET, make_keys

import tensorpipe_ipc as tp
from tensorpipe_ipc import cli
from tensorpipe_ipc.security import write_key_pair


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A folder with key pairs."""
    return make_keys(tmp_path / "keys")


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777])
def test_keygen(umask: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two files, the secret one for its owner alone, whatever the umask; no key is printed."""
    before = os.umask(umask)
    try:
        assert cli.main(["keygen", str(tmp_path / "robot")]) == 0
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"robot.key": 0o644, "robot.key_secret": 0o600}
    said = capsys.readouterr()
    assert (said.err, said.out.count("\n")) == ("", 2)
    public, secret = zmq.auth.load_certificate(tmp_path / "robot.key_secret")
    assert secret is not None
    assert zmq.curve_public(secret) == public
    assert zmq.auth.load_certificate(tmp_path / "robot.key") == (public, None)
    assert public.decode() not in said.out
    assert secret.decode() not in said.out


@pytest.mark.parametrize("there", [PUBLIC, SECRET])
@pytest.mark.parametrize("how", ["file", "link", "dangling link", "folder"])
def test_keygen_never_overwrites(there: str, how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever has one of the two names stays as it is, and nothing is left of the other."""
    path, target = tmp_path / f"robot{there}", tmp_path / "target"
    if how == "folder":
        path.mkdir()
    else:
        if how != "dangling link":
            (path if how == "file" else target).write_text("mine")
        if how != "file":
            path.symlink_to(target)
    before = sorted(tmp_path.iterdir())
    assert cli.main(["keygen", str(tmp_path / "robot")]) == 1
    assert capsys.readouterr().err == (
        f"tensorpipe-ipc: {path} exists: keys are never overwritten; take another name\n"
    )
    assert sorted(tmp_path.iterdir()) == before
    assert how in ("folder", "dangling link") or path.read_text() == "mine"


@pytest.mark.parametrize("name", ["", "keys/"])
def test_keygen_needs_a_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is called ``.key``."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["keygen", name]) == 1
    assert f"name {name!r}: the files need one of their own" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_keygen_where_nothing_can_be_written(tmp_path: Path) -> None:
    """A folder that is not there is said so."""
    with pytest.raises(tp.Refused, match=r"none/robot.key_secret cannot be written: No such file"):
        write_key_pair(str(tmp_path / "none" / "robot"), b"p" * 40, b"s" * 40)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "no space left")])
def test_keygen_that_is_cut_short(error: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left of it, and what cut it short is told: half a pair would be in the way of the next one."""

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(os, "fchmod", fail)
    with pytest.raises((KeyboardInterrupt, tp.Refused)) as raised:
        write_key_pair(str(tmp_path / "cut"), b"x" * 40, b"y" * 40)
    assert isinstance(raised.value, tp.Refused) == isinstance(error, OSError)
    assert not [*tmp_path.iterdir()]


def test_certificates_of_zmq_auth(tmp_path: Path) -> None:
    """An end can use the certificates of pyzmq's own tool, once they are private.

    ``zmq.auth`` leaves that to the umask.
    """
    public, secret = zmq.auth.create_certificates(tmp_path, "theirs")
    os.chmod(secret, 0o600)
    curve = tp.Curve(secret, server=public)
    assert curve.own_keys() == zmq.auth.load_certificate(secret)
    assert curve.server_key() == curve.own_keys()[0]


@pytest.mark.parametrize("mode", [*(0o600 | 1 << bit for bit in range(6)), 0o644, 0o660, 0o777])
def test_a_secret_that_others_may_read(mode: int, keys: Path) -> None:
    """It is refused, with what to do; also where only its group may."""
    path = keys / f"friend{SECRET}"
    path.chmod(mode)
    with pytest.raises(tp.Refused, match=rf"mode {mode:04o}, so others may have read it: make a new pair.*chmod 600"):
        tp.Producer("tcp://127.0.0.1:9", security=tp.Curve(path, server=keys / f"binder{PUBLIC}"))
    path.chmod(0o400)
    tp.Producer("tcp://127.0.0.1:9", security=tp.Curve(path, server=keys / f"binder{PUBLIC}")).close()


@pytest.mark.parametrize("others", [0o020, 0o002], ids=["group", "all"])
@pytest.mark.parametrize("what", ["server", "client", "folder"])
def test_public_keys_that_others_may_change(what: str, others: int, keys: Path) -> None:
    """A key file or folder that others may write to is refused: they could put a key there. They may read it."""
    path = keys if what == "folder" else keys / f"friend{PUBLIC}"
    path.chmod(0o755)
    curve = tp.Curve(keys / f"binder{SECRET}", server=path, clients=path if what == "folder" else [path])
    assert curve.server_key() if what == "server" else curve.client_keys()
    path.chmod(0o755 | others)
    with pytest.raises(tp.Refused, match=r"so others may put keys there: chmod go-w"):
        curve.server_key() if what == "server" else curve.client_keys()


def test_keys_of_another_user(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's file is not believed; root's is."""
    if os.geteuid():  # only root can give a file away
        owner = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    else:
        owner = 65534
        os.chown(keys / f"friend{PUBLIC}", owner, -1)
    curve = tp.Curve(keys / f"binder{SECRET}", clients=keys)
    with pytest.raises(tp.Refused, match=rf"belongs to uid {owner}; keys must be yours \(uid \d+\) or root's"):
        curve.client_keys()
    if owner == 65534:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        for trusted in (0, 12345):
            os.chown(keys / f"friend{PUBLIC}", trusted, -1)
            assert len(curve.client_keys()) == 3


def test_how_much_of_a_file_is_read(tmp_path: Path) -> None:
    """16 KiB, and a file with one byte more is refused: what lies beyond might say that the key is a secret one."""
    path = tmp_path / "some.key"
    line = 'public-key = "' + "x" * 40 + '"'
    path.write_text("#" * ((1 << 14) - 1 - len(line)) + "\n" + line)
    assert path.stat().st_size == 1 << 14
    assert tp.Curve(path, server=path).server_key() == b"x" * 40
    path.write_text("#" * ((1 << 14) - len(line)) + "\n" + line)
    with pytest.raises(tp.Refused, match="has over 16,384 bytes, so it is no key file"):
        tp.Curve(path, server=path).server_key()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "holds no public key"),
        ('curve\n    public-key = "short"\n', "holds no public key"),
        ('public-key = "' + "x" * 41 + '"', "holds no public key"),
        ('public-key = "' + "x" * 39 + 'ü"', "holds no public key"),
        ('public-key = "' + "x" * 40 + '"\n' + 'public-key = "' + "y" * 40 + '"', "more than one public key"),
        ('public-key = "' + "x" * 39 + '~"', "holds a public key that is none"),
        ('public-key = "' + "x" * 35 + '#####"', "holds a public key that is none"),
        ('secret-key = "' + "x" * 40 + '"', "holds a secret key where a public one is wanted"),
        ('public-key = "' + "x" * 40 + '"\n' + "#" * 20000, "has over 16,384 bytes"),
    ],
)
def test_what_is_no_key_file(content: str, why: str, keys: Path, tmp_path: Path) -> None:
    """It is named, with what should be there; its content is not. A damaged key in a binder's list raised KeyError."""
    path = tmp_path / "some.key"
    path.write_text(content)
    path.chmod(0o600 if "secret" in content else 0o644)
    with pytest.raises(tp.Refused, match=why) as refused:
        tp.Consumer("tcp://127.0.0.1:0", security=tp.Curve(keys / f"binder{SECRET}", clients=path))
    assert str(path) in str(refused.value)
    assert "xxxx" not in str(refused.value)


@pytest.mark.parametrize("path", ["missing", "pipe", ".", "/dev/null"])
def test_what_is_no_file(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path to nothing, to a pipe that nobody writes, to a folder or device is refused, and not waited for."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe", 0o600)
    curve = tp.Curve(path, server=path)
    for read in (curve.own_keys, curve.server_key):
        with pytest.raises(tp.Refused, match=r"(cannot be read|neither a file nor|may have read)"):
            read()


def test_a_pair_that_is_none(keys: Path) -> None:
    """A public key file is not this end's own; characters that are no Z85 are no key."""
    public = keys / f"friend{PUBLIC}"
    public.chmod(0o600)
    with pytest.raises(tp.Refused, match="holds a public key where the secret one is wanted"):
        tp.Curve(public, server=public).own_keys()
    half = keys / "half"
    half.write_text('secret-key = "' + "x" * 40 + '"')
    half.chmod(0o600)
    with pytest.raises(tp.Refused, match="holds no key pair"):
        tp.Curve(half, server=public).own_keys()
    secret = keys / f"friend{SECRET}"
    secret.write_text("".join(f'{half}-key = "{"~" * 40}"\n' for half in ("public", "secret")))
    with pytest.raises(tp.Refused, match=rf"friend{SECRET} holds a public key that is none") as refused:
        tp.Producer("tcp://127.0.0.1:9", security=tp.Curve(secret, server=public))
    assert "~~~" not in str(refused.value)


def test_a_public_key_in_the_place_of_the_secret_one(keys: Path) -> None:
    """That is said, and not that others may read it, as they should; a secret key that they may read is refused for that."""
    for mode in (0o644, 0o600):
        os.chmod(keys / f"friend{PUBLIC}", mode)
        with pytest.raises(tp.Refused, match=f"friend{PUBLIC} holds a public key where the secret one is wanted: name"):
            tp.Curve(keys / f"friend{PUBLIC}", server=keys / f"binder{PUBLIC}").own_keys()
    os.chmod(keys / f"friend{PUBLIC}", 0o644)
    os.chmod(keys / f"friend{SECRET}", 0o644)
    with pytest.raises(tp.Refused, match="has mode 0644, so others may have read it"):
        tp.Curve(keys / f"friend{SECRET}", server=keys / f"binder{PUBLIC}").own_keys()
    os.chmod(keys / f"friend{SECRET}", 0o600)


def test_clients(keys: Path) -> None:
    """One file, several, or a folder of which public keys count; an empty one lets nobody in, and says so."""
    own = keys / f"binder{SECRET}"
    files = [keys / f"{name}{PUBLIC}" for name in ("friend", "other")]
    assert len(tp.Curve(own, clients=files[0]).client_keys()) == 1
    assert len(tp.Curve(own, clients=str(files[0])).client_keys()) == 1
    assert len(tp.Curve(own, clients=iter(files)).client_keys()) == 2
    assert len(tp.Curve(own, clients=keys).client_keys()) == 3
    (keys / "empty").mkdir()
    for nobody in (keys / "empty", []):
        with pytest.raises(tp.Refused, match="lists no key, so nobody could connect"):
            tp.Curve(own, clients=nobody).client_keys()


def test_what_a_curve_is_made_of(keys: Path) -> None:
    """Somebody on the other side must be named, and everything is a path. A key in its place is not repeated."""
    with pytest.raises(ValueError, match=r"neither server= .* nor clients="):
        tp.Curve(keys / f"binder{SECRET}")
    wrong: Any
    for wrong in (5, b"key", object()):
        for given in (
            {"secret": wrong, "server": "x"},
            {"secret": "x", "server": wrong},
            {"secret": "x", "clients": wrong},
        ):
            with pytest.raises(TypeError, match="an? [a-z]+ where the path of a key file|not iterable"):
                tp.Curve(**given)
    _, key = tp.Curve(keys / f"binder{SECRET}", server="x").own_keys()
    word = key.decode()
    for text in (word, f"{word}\n", f" {word}", f'"{word}"', (keys / f"binder{SECRET}").read_text()):
        for given in (
            {"secret": text, "server": "x"},
            {"secret": "x", "server": text},
            {"secret": "x", "clients": [text]},
        ):
            with pytest.raises(ValueError, match="the key itself") as error:
                tp.Curve(**given)
            assert word not in str(error.value)


def test_a_curve_is_not_pickled(keys: Path) -> None:
    """Nor copied: what it stands for stays in the process and place that it was made in."""
    curve = tp.Curve(keys / f"binder{SECRET}", clients=keys)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(TypeError, match="Curve is not pickled: hand on the paths"):
            pickle.dumps(curve, protocol)
    for duplicate in (copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="Curve is not pickled"):
            duplicate(curve)
