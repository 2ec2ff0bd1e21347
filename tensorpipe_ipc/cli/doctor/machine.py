"""Try out each thing that shared memory needs on this machine, and name the limits that a program will meet."""

from __future__ import annotations

import errno
import glob
import os
import platform
import resource
from collections.abc import Callable, Iterator

import torch

from tensorpipe_ipc.cli.doctor.finding import Finding, State
from tensorpipe_ipc.compiled import why_off
from tensorpipe_ipc.errors import SharedMemoryError
from tensorpipe_ipc.headroom import headroom
from tensorpipe_ipc.memory.segment import MINIMUM_SIZE, Segment
from tensorpipe_ipc.process import identity
from tensorpipe_ipc.shared_queue.token_pipe import CAPACITY, TokenPipe
from tensorpipe_ipc.zeromq.zmq_sockets import library

__all__ = ["findings"]

_FEW_DESCRIPTORS = 256
_LITTLE = 1 << 28  # bytes


def findings() -> Iterator[Finding]:
    """Yield all findings, in the order in which shared memory needs the things."""
    yield Finding("system", State.NOTE, f"{platform.system()} {platform.release()}, Python {platform.python_version()}")
    for what, look in _NEEDED.items():
        try:
            yield Finding(what, State.OK, look())
        except (OSError, AttributeError) as failed:
            yield Finding(what, State.NO, _why(failed))
    yield from (look() for look in (_compiled, _descriptors, _memory, _dev_shm, _zmq, _curve, _gpu, _page_locking))


def _why(failed: Exception) -> str:
    if isinstance(failed, OSError):
        return failed.strerror or str(failed)
    return f"this system has none ({failed}): queues are Linux's, endpoints use frames"


def _compiled() -> Finding:
    why = why_off()
    if why:
        return Finding(
            "compiled", State.NOTE, f"off: {why}; small messages take some four times the time of the processor"
        )
    return Finding("compiled", State.OK, "small messages go by it")


def _memfd() -> str:
    segment = Segment.create()
    return f"a sealed one, of up to {_size(segment.size)} of addresses"


def _seals() -> str:
    """Check that a segment cannot be shrunk while processes read it."""
    segment = Segment.create(MINIMUM_SIZE)
    try:
        os.ftruncate(segment.descriptor, 4096)
    except PermissionError:
        return "nobody can shrink it under those who read it (no Bus error)"
    raise SharedMemoryError(errno.EPERM, "a sealed memfd could be shrunk: this kernel does not keep seals")


def _reopening() -> str:
    segment = Segment.create(MINIMUM_SIZE)
    try:
        os.close(os.open(f"/proc/self/fd/{segment.descriptor}", os.O_RDWR | os.O_CLOEXEC))
    except OSError as failed:
        raise SharedMemoryError(
            failed.errno,
            f"descriptors cannot be opened again under /proc ({failed.strerror}): mount /proc in this container; "
            "endpoints use frames, queues do not work",
        ) from None
    return f"descriptors can be opened again under /proc (pid namespace {identity().namespace})"


def _pipes() -> str:
    pipe = TokenPipe.create(1)
    spills = pipe.spills
    pipe.close()
    limit = _number("/proc/sys/fs/pipe-user-pages-soft")
    if spills:
        raise SharedMemoryError(
            errno.ENOSPC,
            f"no pipe of 64 KiB is to be had: this user has more than {limit} pages of pipes "
            "(raise fs.pipe-user-pages-soft, or close some)",
        )
    each = f", this user may have {limit // 16:,} of them" if limit else ""
    return f"64 KiB each, for {CAPACITY:,} messages in a queue at least{each}"


_NEEDED: dict[str, Callable[[], str]] = {"memfd": _memfd, "seals": _seals, "/proc": _reopening, "pipes": _pipes}


def _descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft:,} may be open in a process (up to {hard:,} by ulimit -n); four for a queue or a peer, none for a tensor"
    return Finding("descriptors", State.NOTE if soft < _FEW_DESCRIPTORS else State.OK, text)


def _memory() -> Finding:
    room = headroom()
    text = f"{_size(room)} left by the machine and the cgroups above; a queue's arena takes up to half"
    return Finding("memory", State.NOTE if room < _LITTLE else State.OK, text)


def _dev_shm() -> Finding:
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return Finding("/dev/shm", State.NOTE, "there is none; it is not needed")
    how = "read-only" if found.f_flag & os.ST_RDONLY else f"{_size(found.f_bavail * found.f_frsize)} free"
    return Finding("/dev/shm", State.NOTE, f"{how}; it is not used: torch.multiprocessing's own queues do")


def _zmq() -> Finding:
    pyzmq, libzmq, _ = library()
    return Finding("ZeroMQ", State.OK, f"pyzmq {pyzmq}, libzmq {libzmq}")


def _curve() -> Finding:
    has = library()[2]
    return Finding("CURVE", State.NOTE, "libzmq has it" if has else "this libzmq is built without: no other hosts")


def _gpu() -> Finding:
    devices = glob.glob("/dev/nvidia[0-9]*")
    built = f"torch {torch.__version__}, " + (f"CUDA {torch.version.cuda}" if torch.version.cuda else "built for CPU")
    return Finding("GPU", State.NOTE, f"{built}; {len(devices) or 'no'} NVIDIA device{'s' * (len(devices) != 1)} here")


def _page_locking() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = "no limit" if soft == resource.RLIM_INFINITY else f"up to {_size(soft)} by ulimit -l"
    return Finding("page-locking", State.NOTE, text)


def _number(path: str) -> int:
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 0


def _size(nbytes: int) -> str:
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"
