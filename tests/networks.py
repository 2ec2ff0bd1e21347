"""Two hosts on one machine: a network namespace each, joined by a veth pair, and process numbers and a /proc of their own.

Nothing of it has a name outside: it goes with the descriptors that hold it. ``WHY_NOT`` says why it cannot be had here: it
takes root, iproute2, util-linux, and a kernel with veth.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

__all__ = ["Host", "WHY_NOT", "enter", "two_hosts"]

_LINE = "line"
_NOBODYS = "02:00:00:00:00:01"  # a card's number


class Host:
    """One of them.

    Attributes:
        address: its own, by which the other one reaches it.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        try:
            own = os.stat("/proc/self/ns/net").st_ino
            while os.stat(f"/proc/{self._holder.pid}/ns/net").st_ino == own:
                if self._holder.poll() is not None:
                    raise OSError(f"unshare ended with {self._holder.returncode}")
            self.network = os.open(f"/proc/{self._holder.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        except BaseException:
            self._let_go()
            raise

    @property
    def pid(self) -> int:
        """A process there, until ``close``."""
        return self._holder.pid

    @property
    def path(self) -> str:
        """A file by which processes enter the network, as long as this one keeps it."""
        return f"/proc/{os.getpid()}/fd/{self.network}"

    @property
    def prefix(self) -> list[str]:
        """Return the start of a command line that runs there."""
        there = ["nsenter", f"--net={self.path}"]
        return [*there, "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]

    def run(self, *command: str) -> str:
        """Run a command in the network, and return what it prints."""
        done = subprocess.run([*self.prefix[:2], *command], capture_output=True, text=True, timeout=10)
        if done.returncode:
            raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def received(self) -> int:
        """Bytes that came over the line."""
        (line,) = [each for each in self.run("cat", "/proc/net/dev").splitlines() if each.strip().startswith(_LINE)]
        return int(line.partition(":")[2].split()[0])

    def unacknowledged(self) -> int:
        """Bytes that were sent from here by TCP and that the other host has not acknowledged."""
        sockets = self.run("tail", "-qn", "+2", "/proc/net/tcp", "/proc/net/tcp6").splitlines()
        return sum(int(each.split()[4].partition(":")[0], 16) for each in sockets)

    def lose(self, other: Host) -> None:
        """Have all be lost that goes from here to the other one, and not what comes from there."""
        self.run("ip", "neigh", "replace", other.address, "lladdr", _NOBODYS, "dev", _LINE, "nud", "permanent")

    def find(self, other: Host) -> None:
        """The end of that."""
        self.run("ip", "neigh", "del", other.address, "dev", _LINE)

    def close(self) -> None:
        """Its end of the line is gone, and so are its addresses, with the last program there."""
        os.close(self.network)
        self._let_go()

    def _let_go(self) -> None:
        self._holder.kill()
        self._holder.wait()


def enter(_: Any, network: str) -> None:
    """Have this process be on a host. Its libraries' threads are, too, if it has none yet.

    Args:
        network: ``Host.path``.
    """
    fd = os.open(network, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(fd, 0):
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(fd)


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Both.

    Raises:
        OSError: they cannot be had.
    """
    with contextlib.ExitStack() as stack:
        hosts = []
        for address in ("10.211.7.1", "10.211.7.2"):
            hosts.append(Host(address))
            stack.callback(hosts[-1].close)
        one, other = hosts
        one.run("ip", "link", "add", _LINE, "type", "veth", "peer", "name", _LINE, "netns", str(other.pid))
        for host in hosts:
            host.run("ip", "address", "add", f"{host.address}/24", "dev", _LINE)
            host.run("ip", "link", "set", _LINE, "up")
        yield one, other


def _why_not() -> str:
    if os.geteuid():
        return "it takes root"
    missing = [name for name in ("ip", "unshare", "nsenter", "sleep", "cat", "tail") if shutil.which(name) is None]
    if missing:
        return f"there is no {missing[0]}"
    try:
        with two_hosts():
            return ""
    except (OSError, subprocess.TimeoutExpired) as failed:
        return str(failed)


WHY_NOT = _why_not()
