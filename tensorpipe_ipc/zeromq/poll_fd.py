"""One descriptor that tells of several: an end's ZeroMQ socket, its queues, and what it knows itself."""

from __future__ import annotations

import os
import select
from contextlib import suppress

from tensorpipe_ipc.owned_fd import OwnedFd, owned

__all__ = ["PollFd"]


class PollFd:
    """An epoll descriptor over ZeroMQ's own and one of ours.

    ZeroMQ's is readable when it has work to do, and falls silent once it has looked, though messages may be left. So
    ours (an eventfd) speaks for those: it is readable while there are some.

    Attributes:
        fd: the epoll descriptor.
    """

    def __init__(self, zmq_fds: list[int]) -> None:
        """
        Args:
            zmq_fds: ZeroMQ's.
        """
        self._epoll = select.epoll()
        self._watched: set[int] = set()
        self._own: OwnedFd | None = None
        self._shown: bool | None = False  # None: an exception came between ours and this
        for zmq_fd in zmq_fds:
            self._epoll.register(zmq_fd, select.EPOLLIN)
        self.fd = self._epoll.fileno()

    def watch(self, fd: int, edge: bool) -> None:
        """Tell of another one, too; with ``edge``, when something is added. Again: nothing."""
        if fd not in self._watched:
            with suppress(FileExistsError):  # an exception came between these two, the last time
                self._epoll.register(fd, select.EPOLLIN | select.EPOLLET if edge else select.EPOLLIN)
            self._watched.add(fd)

    def unwatch(self, fd: int) -> None:
        """The end of that."""
        self._watched.discard(fd)
        with suppress(OSError, ValueError):  # the latter: it is closed
            self._epoll.unregister(fd)

    def wait(self, timeout: float) -> list[int]:
        """Return those that tell of something, within ``timeout`` seconds."""
        if self._shown is not False:  # what is to be shown is found out anew after this
            self.show(False)
        return [fd for fd, _ in self._epoll.poll(timeout)]

    def prepare_to_show(self) -> None:
        """Have one of ours. Again: nothing.

        Raises:
            OSError: no descriptor is left.
        """
        if self._own is None:
            own = owned(os.eventfd, 0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._epoll.register(own, select.EPOLLIN)
            self._own = own

    def show(self, ready: bool) -> None:
        """Be readable, or not, as far as ours is concerned."""
        if ready is self._shown or self._own is None:
            return
        self._shown = None
        if ready:
            os.eventfd_write(self._own.fileno(), 1)
        else:
            with suppress(BlockingIOError):  # an exception came before it was written, or when it was read
                os.eventfd_read(self._own.fileno())
        self._shown = ready

    def close(self) -> None:
        """Close it, and ours."""
        self._epoll.close()
        self._own = None
