"""Names of hosts. libzmq is given numbers only.

It would look a name up in the one thread that serves all ends of the process. While no name server answers, that takes 10 to
20 s, in which nothing comes or goes, and no end can close. And of several addresses it takes the first, for good.

A connector's look-up runs in a thread of its own, which ends with it. That thread has nothing but the look-up, so nobody waits
for it: neither a call, nor close, nor the end of the program, nor a child that is forked meanwhile.
"""

from __future__ import annotations

import _thread
import math
import signal
import socket
import time

from tensorpipe_ipc.handlers import reraise_from_handler
from tensorpipe_ipc.zeromq.addresses import Address

__all__ = ["Host", "numbers", "places"]

_APART = 1.0  # seconds from the begin of a look-up to that of the next one, at least
_SOONEST, _LATEST = 0.01, 0.2  # seconds until one that is under way is looked at again
# The answers by which a host has no address. All others say that nobody who knows has answered.
_NO_SUCH_HOST = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}


class Host:
    """The host that a connector's address names."""

    def __init__(self, address: Address) -> None:
        """Nothing is looked up yet.

        Args:
            address: the connector's; it has a name.
        """
        self._address = address
        self._found: list[Address] = []  # the last that were, in the order in which they are to be tried
        self._proven: Address | None = None  # by which a connection last stood
        self._tried: Address | None = None  # last
        self._look_up: _LookUp | None = None  # that is under way
        self._due = -math.inf  # when the next may begin
        self._trouble = "its host's name is being looked up"  # until the first one is over; then what was in its way

    def is_found(self) -> bool:
        """Return whether an address is known. What was found meanwhile counts from here on; and a look-up begins if it is due.

        To be called before each try: so there is one for a connection that is lost, and for one that cannot be made.
        """
        if self._look_up is not None and self._look_up.is_over:
            self._take(self._look_up)
        if self._look_up is None and time.monotonic() >= self._due:
            self._begin()
        return bool(self._found)

    def _begin(self) -> None:
        look_up, self._due = _LookUp(), time.monotonic() + _APART
        try:
            _thread.start_new_thread(_run, (self._address, look_up))
        except RuntimeError as error:
            reraise_from_handler(error)
            self._trouble = "no thread can be started to look up the host's name"
        else:
            self._look_up = look_up  # not before: an exception in between then costs one more thread, and not the name

    def _take(self, look_up: _LookUp) -> None:
        """Put what is new before what was tried, which stays in its order: name servers give another one each time."""
        before = self._found
        if look_up.found:
            self._found = sorted(look_up.found, key=lambda each: before.index(each) if each in before else -1)
            if self._found[0] not in before:
                self._tried = self._proven  # so the new one is next
        self._trouble, self._look_up = look_up.trouble, None

    def next(self) -> Address:
        """Return the address to try now, in numbers: one that was not tried yet, or longest ago. One must be known.

        Every second try is by the one that has proven itself. Others may never answer, and each takes its time.
        """
        found = self._found
        is_its_turn = self._proven in found and self._tried != self._proven
        now = self._proven if is_its_turn and self._proven is not None else found[0]
        self._found = [*(each for each in found if each != now), now]  # in one step: a handler may raise
        self._tried = now
        return now

    def stood(self) -> None:
        """A connection to the address that ``next`` has returned stood: it is the next again."""
        self._proven, self._tried = self._tried, None

    @property
    def is_awaited(self) -> bool:
        """Return whether no address is known, and a look-up is under way."""
        return not self._found and self._look_up is not None

    @property
    def is_due_soon(self) -> bool:
        """Return whether one is awaited since a moment ago: most look-ups end at once, and the others after any time."""
        return self.is_awaited and self.patience() < _LATEST

    def patience(self) -> float:
        """Return the seconds until that look-up is to be looked at again: as many as it has taken so far, within limits."""
        assert self._look_up is not None
        return min(max(_SOONEST, time.monotonic() - self._look_up.begun), _LATEST)

    def trouble(self) -> str:
        """Say why it is not known whether there is such a host; "" if it is."""
        return "" if self._found else self._trouble


class _LookUp:
    """One look-up, as its thread and its connector share it."""

    __slots__ = ("begun", "found", "is_over", "trouble")

    def __init__(self) -> None:
        self.begun = time.monotonic()
        self.found: list[Address] = []
        self.trouble = ""
        self.is_over = False


def _run(address: Address, look_up: _LookUp) -> None:
    """Be the thread. The program's signals are for others."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        look_up.found = numbers(address)
    except OSError as error:
        if error.errno not in _NO_SUCH_HOST:
            look_up.trouble = f"its host's name cannot be looked up: {error.strerror}"
    finally:
        look_up.is_over = True


def numbers(address: Address) -> list[Address]:
    """Look a name up; wait for that. The addresses of its host, in numbers, in the order that the system gives them.

    Raises:
        OSError: it has none, or nobody who knows has answered.
    """
    name, port = _name_and_port(address)
    # Bytes: a str has Python import what encodes it, under a lock that a child forked meanwhile would wait for.
    found = socket.getaddrinfo(name.encode(), None, type=socket.SOCK_STREAM)
    hosts = dict.fromkeys(_number(*end) for family, *_, end in found if family in (socket.AF_INET, socket.AF_INET6))
    if not hosts:
        raise socket.gaierror(socket.EAI_NONAME, "the host has no address of IPv4 or IPv6")
    return [address._replace(text=f"tcp://{host}:{port}") for host in hosts]


def _number(host: str, _port: int, _flow: int = 0, scope: int = 0) -> str:
    """Return a host's number as ZeroMQ takes it, from the address of a socket."""
    if ":" not in host:
        return host
    return f"[{host}%{scope}]" if scope and "%" not in host else f"[{host}]"


def places(address: Address) -> list[Address]:
    """Return where a binder may bind: the address itself, or where that has a host's name, those of the host.

    A name of one of this host's interfaces is such a place. libzmq asks the kernel for it.

    Raises:
        OSError: as ``numbers``.
    """
    interfaces = (name for _, name in socket.if_nameindex()) if address.has_name else ()
    if not address.has_name or _name_and_port(address)[0] in interfaces:
        return [address]
    return numbers(address)


def _name_and_port(address: Address) -> tuple[str, str]:
    name, _, port = address.text.removeprefix("tcp://").rpartition(":")
    return name.strip("[]"), port
