"""What the kernel is told of a connection that tensors leave by, beyond what libzmq has an option for.

A unix socket's send buffer holds 208 KB. So 4 MB go over in 19 pieces, and for each of them the sender's thread sleeps until
the receiver has read three quarters of it and woken it. A larger one also lets the next message be encoded while the receiver
still reads the last. Both processes pinned to a core of their own (EPYC VM; the cores shared with other work)::

    4 MB over ipc             one way     messages/s
    208 KB, as it is          1,500 us           767
    512 KB                      807 us         1,166
    1 MB                        825 us         1,183
    8 MB                        786 us         1,073

A tcp socket finds its buffer by itself. But where the host's congestion control is bbr, it paces a connection of loopback by
what it found its bandwidth to be, of which a sender that waits now and then gives it no idea. There is nobody on loopback to
give way to. 4 MB, beside a bare two-frame pyzmq loop under bbr: 1.67 times its time one way with bbr and 1.46 with reno, 0.85
and 1.20 times its messages/s.
"""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress

from tensorpipe_ipc.transport.addresses import Address

__all__ = ["prepare_for_bulk"]

_SEND_BUFFER = 1 << 19  # bytes; the kernel cuts it to net.core.wmem_max (208 KB and up), and doubles it


def prepare_for_bulk(fd: int, address: Address) -> None:
    """Set up a connection for large frames.

    Args:
        fd: its descriptor. It is libzmq's, whose thread may have closed it by now: then nothing happens.
        address: of one of its two ends. A number is used again: so is seen that it is that connection's still.
    """
    with suppress(OSError):
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return
        with socket.fromfd(fd, socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            ends = connection.getsockname(), connection.getpeername()
            if address.path:
                if address.path in ends:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
            elif int(address.text.rpartition(":")[2]) in (end[1] for end in ends if isinstance(end, tuple)):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
