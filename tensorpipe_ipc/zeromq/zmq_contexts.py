"""ZeroMQ's contexts: one a process, for as long as it has an end open, and one more for each binder with keys.

A signal's handler may open or close an end while its thread opens or closes another. So a context is made and noted down in one
step, and no lock is held while one ends. It ends in a thread that gets no signals: pyzmq takes a call that a signal interrupts
for done, and the context's threads and descriptors would stay.

Where libzmq finds no descriptor for what it needs, it ends the process. So there must be enough before an end is opened.
"""

from __future__ import annotations

import _thread
import ctypes
import functools
import os
import resource
import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable
from itertools import chain
from typing import Any, TypeVar

import zmq

from tensorpipe_ipc.borrowed import pyzmq_reaper, running_threads
from tensorpipe_ipc.errors import Refused
from tensorpipe_ipc.forks import no_fork, watch
from tensorpipe_ipc.handlers import reraise_from_handler
from tensorpipe_ipc.libc import libc
from tensorpipe_ipc.owned_fd import OwnedFd, pipe
from tensorpipe_ipc.process import ProcessKey, process_key
from tensorpipe_ipc.sections import undisturbed

__all__ = [
    "acquire",
    "check_descriptors",
    "forget_bound",
    "has_descriptors",
    "hold_reaper",
    "if_bound_here",
    "is_bound_here",
    "note_bound",
    "open_socket",
    "release",
    "repeated",
    "router",
    "run_beside_reaper",
]

_T = TypeVar("_T")

_DESCRIPTORS = 20  # a context takes six, an end with keys and all that it may open at once a dozen
_REAPERS = 12  # pyzmq's thread for lent memory takes seven, and libzmq ends the process where it finds none
_OF_A_CONTEXT = 3  # threads: two, and one to spare
_OF_THE_REAPER = 5  # its own, the one that starts it, two of its context, and one to spare
_SOCKETS = 8  # a socket, what watches it, and its connection take four
_FORK = 0.1  # seconds until one that waits for a thread sees whether it has become a fork

_ACQUIRE, _RELEASE = _thread.LockType.acquire, _thread.LockType.release


class _Shared:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.contexts: dict[zmq.Context[Any], set[int]] = {}  # and which ends use each, by id
        self.sockets: weakref.WeakSet[zmq.Socket[bytes]] = weakref.WeakSet()  # all that were opened
        self.common: zmq.Context[Any] | None = None
        self.naming = threading.RLock()  # whoever connects by an address of ``bound``, or gives one back, holds it
        self.bound: dict[str, int] = {}  # addresses within this process, and which end has each, by id


_shared: dict[ProcessKey, _Shared] = {}  # a forked child must touch neither its parent's contexts nor its lock


def acquire(end: object, *, own: bool) -> zmq.Context[Any]:
    """Return a context for one more end.

    Args:
        end: that end.
        own: one that no other end has.

    Raises:
        Refused: too few descriptors, or threads, are left to open an end.
    """
    check_descriptors(_DESCRIPTORS)
    shared = _shared.setdefault(process_key(), _Shared())
    with shared.lock:
        context = None if own else shared.common
        if context is not None:
            shared.contexts[context].add(id(end))
            return context
    _check_threads(_OF_A_CONTEXT)
    with shared.lock:
        context = None if own else shared.common  # a handler, or another thread, may have made one in between
        if context is None:
            # It is known, and in use, from its first moment on, whatever a signal's handler does next.
            shared.contexts.update(zip(map(zmq.Context, (1,)), ({id(end)},), strict=True))
            context = next(made for made, ends in reversed(shared.contexts.items()) if id(end) in ends)
            if not own:  # else 341 connectors have all of them
                context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))
        if not own:
            context = shared.common = shared.common or context  # so may a handler meanwhile
        shared.contexts[context].add(id(end))
        return context


def note_bound(end: object, address: str) -> None:
    """Note that an end has bound an address within this process."""
    _shared[process_key()].bound[address] = id(end)


def forget_bound(end: object, address: str) -> None:
    """Forget that, before the end closes. Of an address that is another's, or was forgotten: nothing."""
    shared = _shared.setdefault(process_key(), _Shared())
    with shared.naming:
        if shared.bound.get(address) == id(end):
            del shared.bound[address]


def if_bound_here(address: str, connect: Callable[[], object]) -> bool:
    """Have an end connect to an address within this process, if another has bound it; and does not give it back meanwhile.

    Where none has, libzmq keeps what a connector says, and its socket, for the next binder, though the connector has closed.

    Returns:
        Whether it has.
    """
    shared = _shared.setdefault(process_key(), _Shared())
    with shared.naming:
        if not is_bound_here(address):
            return False
        connect()
    return True


def is_bound_here(address: str) -> bool:
    """Return whether an end has bound an address within this process."""
    shared = _shared.get(process_key())
    return shared is not None and address in shared.bound


def open_socket(context: zmq.Context[Any], kind: int) -> zmq.Socket[bytes]:
    """Return a new socket of a context. It is known before it is open, so that what an exception does to it closes it, too.

    pyzmq's own Context.socket notes it down afterwards: then a context waited for ever for one that nobody knew.
    """
    made: zmq.Socket[bytes] = zmq.Socket.__new__(zmq.Socket)
    _shared[process_key()].sockets.add(made)
    made.__init__(context, kind)  # type: ignore[misc]
    return made


def router(context: zmq.Context[Any]) -> zmq.Socket[bytes]:
    """Return a ROUTER that numbers its connections from a number on which nobody can tell.

    A connection may choose a name of its own, and libzmq ends the process where that is the next one's number. It takes the
    first of them from C's rand, which nobody else may have seeded: then it is the same in every process.
    """
    library = libc()
    with no_fork():  # nor does another thread set it back meanwhile
        program = library.rand()
        library.srand(ctypes.c_uint(int.from_bytes(os.urandom(4), "little")))
        try:
            return open_socket(context, zmq.ROUTER)
        finally:
            library.srand(ctypes.c_uint(program))  # a program that seeds it gets the same numbers each time


def has_descriptors() -> bool:
    """Return whether enough are left for a socket more, and what watches it."""
    try:
        check_descriptors()
    except Refused:
        return False
    return True


def check_descriptors(count: int = _SOCKETS) -> None:
    """See that so many descriptors are left; by default, enough for a socket more, and what watches it.

    Raises:
        Refused: they are not.
    """
    taken: list[OwnedFd] = []
    try:
        while len(taken) < count:
            taken += pipe()
    except OSError as failed:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        raise Refused(
            f"no end can be opened: {failed.strerror} (this process may have {limit}, and {count} must be free): "
            "close some, or raise the limit (ulimit -n)"
        ) from None
    finally:
        taken.clear()


def _check_threads(count: int) -> None:
    """See that so many threads can be started: libzmq ends the process where it cannot.

    Each passes a gate, and is over. It does so in C: no garbage is collected there, whose finalizers may want a lock that the
    one who waits here has. A child that a handler forks meanwhile has none of them.

    Raises:
        Refused: they cannot.
    """
    process, gate, passed = os.getpid(), _thread.allocate_lock(), list[_thread.LockType]()
    try:
        with gate:  # which opens whatever an exception of a signal's handler cuts short
            while len(passed) < count:
                over = _thread.allocate_lock()
                over.acquire()
                steps = chain(map(_ACQUIRE, (gate,)), map(_RELEASE, (gate, over)))
                _thread.start_new_thread(deque[object](maxlen=0).extend, (steps,))
                passed.append(over)
    except RuntimeError as error:
        reraise_from_handler(error)
        raise Refused(
            f"no end can be opened: {error} ({count} are needed): end some, or raise the limit (ulimit -u, or the "
            "container's pids.max)"
        ) from None
    for over in passed:
        _wait_for(over, process)


def _wait_for(over: _thread.LockType, process: int) -> None:
    """Wait for a lock that another thread of a process lets go of. In a fork of that process nobody does."""
    while not over.acquire(timeout=_FORK) and os.getpid() == process:
        pass


def release(end: object) -> None:
    """An end has closed its sockets. The last one waits until what they had to send has left, or their linger is over.

    Again: what an exception left undone, or nothing.
    """
    shared = _shared.get(process_key())
    if shared is None:
        return
    with shared.lock:
        for ends in list(shared.contexts.values()):
            ends.discard(id(end))
        unused = [context for context, ends in list(shared.contexts.items()) if not ends]
        if shared.common in unused:
            shared.common = None  # first: nobody gets one that is about to end
    if unused:
        _run_undisturbed(functools.partial(_destroy, shared, unused))


def _destroy(shared: _Shared, contexts: list[zmq.Context[Any]]) -> None:
    """End contexts, with the sockets that exceptions kept from being known to their ends."""
    for context in contexts:
        if shared.contexts.pop(context, None) is not None:  # else another thread ends it
            for socket in list(shared.sockets):
                if socket.context is context:
                    socket.close()
            context.term()


def _run_undisturbed(work: Callable[[], None]) -> None:
    """Run something in a thread that gets no signals, and runs no handler of one. Wait for it."""
    process, done = os.getpid(), _thread.allocate_lock()
    done.acquire()
    try:
        _thread.start_new_thread(_be_the_thread, (_without_signals, (work, done)))
    except RuntimeError as error:  # no thread can be started, as at the program's end
        reraise_from_handler(error)
        _without_signals(work, done)
    _wait_for(done, process)


def _be_the_thread(work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    try:
        work(*arguments)
    finally:
        if running_threads is not None:
            running_threads.pop(_thread.get_ident(), None)  # or it is listed for ever


def _without_signals(work: Callable[[], None], done: _thread.LockType) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        with undisturbed():  # until nobody waits for it: who does may have locks that closing an end takes
            try:
                work()
            finally:
                done.release()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def repeated(call: Callable[..., _T], *arguments: Any) -> _T:
    """Return the result of a call of pyzmq's that a signal may interrupt, and that pyzmq does not repeat then by itself."""
    while True:
        try:
            return call(*arguments)
        except zmq.error.InterruptedSystemCall:
            continue


def hold_reaper() -> None:
    """See that pyzmq's thread for lent memory runs, before anything is lent.

    An exception of a signal's handler while pyzmq starts it, or asks Thread.is_alive, leaves a thread that runs and is taken
    for dead (bpo-45274). Then pyzmq starts another for each frame, which ends at once, as the first one has the address; and
    forgets what is lent, so that nothing is heard of it any more. So it is started by a thread that handlers do not
    interrupt, and is asked by what is done in one step.

    Raises:
        Refused: too few descriptors, or threads, are left to start it.
    """
    if pyzmq_reaper is None or running_threads is None:
        return
    thread = pyzmq_reaper.thread
    if thread is not None and pyzmq_reaper.pid == os.getpid() and "is_alive" in thread.__dict__:
        return
    check_descriptors(_REAPERS)
    _check_threads(_OF_THE_REAPER)
    watch(_renew_reapers_lock)
    _run_undisturbed(_start_reaper)


def run_beside_reaper(work: Callable[..., None], *arguments: Any) -> bool:
    """Run something in a thread of its own if this is pyzmq's, which all that is lent waits for. Return whether it is."""
    thread = None if pyzmq_reaper is None or pyzmq_reaper.pid != os.getpid() else pyzmq_reaper.thread
    if thread is None or thread.ident != _thread.get_ident():
        return False
    try:
        _thread.start_new_thread(_be_the_thread, (work, arguments))
    except RuntimeError as error:  # no thread can be started
        reraise_from_handler(error)
        return False
    return True


def _renew_reapers_lock() -> None:
    """In a child: another thread of its parent may have had the lock when it was forked."""
    if pyzmq_reaper is not None:
        pyzmq_reaper._lock = threading.Lock()


def _start_reaper() -> None:
    """Start it. It gets no signals either, as it begins with this thread's mask."""
    reaper, running = pyzmq_reaper, running_threads
    assert running is not None
    with reaper._lock:
        if not reaper.is_alive():
            reaper.start()
        thread: Any = reaper.thread
        thread.is_alive = functools.partial(running.__contains__, thread.ident)
