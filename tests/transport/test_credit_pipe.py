"""The credit pipe: what may be opened, what is written to it, and that nobody else's descriptor is taken for it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from raw_ends import RawEnd, hello, hello_of

import tensorpipe_ipc as tp
from tensorpipe_ipc.process import identity
from tensorpipe_ipc.transport.credit_pipe import CreditPipe, open_credit_pipe, write_credit
from tensorpipe_ipc.wire.header import Kind, pack


@pytest.fixture
def pipe() -> Iterator[CreditPipe]:
    """A producer's pipe."""
    pipe = CreditPipe()
    yield pipe
    pipe.close()


def test_credit_goes_through(pipe: CreditPipe) -> None:
    """What consumers write is read in order, with the low 32 bits of the sequence; then there is nothing."""
    opened = open_credit_pipe(identity(), pipe.offer(7))
    assert write_credit(opened, 7, 1)
    assert write_credit(opened, 8, (5 << 32) + 9)
    assert pipe.read() == [(7, 1), (8, 9)]
    assert pipe.read() == []
    os.close(opened)


def test_a_full_pipe_and_a_gone_producer_are_no_error(pipe: CreditPipe) -> None:
    """A consumer learns that it could not write, and sends a message instead."""
    opened = open_credit_pipe(identity(), pipe.offer(1))
    written = 0
    while write_credit(opened, 1, written):
        written += 1
    assert len(pipe.read()) == written == 65536 // 8
    os.close(opened)
    other = CreditPipe()
    opened = open_credit_pipe(identity(), other.offer(1))
    other.close()
    assert not write_credit(opened, 1, 1)
    os.close(opened)


def test_what_is_not_that_pipe_is_not_opened(pipe: CreditPipe, tmp_path: Path) -> None:
    """Another inode, a file, a socket, a closed number, another process, another namespace: none is written to."""
    fd, inode, number = pipe.offer(1)
    me = identity()
    assert open_credit_pipe(me, (fd, inode + 1, number)) == -1
    with open(f"{tmp_path}/file", "wb") as file, socket.socket() as unconnected:
        for other in (file.fileno(), unconnected.fileno()):
            assert open_credit_pipe(me, (other, os.fstat(other).st_ino, number)) == -1
    for none in (1 << 20, -1, 1 << 70):
        assert open_credit_pipe(me, (none, inode, number)) == -1
    for change in ({"pid": 1 << 22}, {"namespace": 1}, {"boot": "another"}):
        assert open_credit_pipe(msgspec.structs.replace(me, **change), (fd, inode, number)) == -1
    assert (tmp_path / "file").read_bytes() == b""


def test_a_hello_that_offers_another_pipe_gets_messages() -> None:
    """A producer whose pipe cannot be had gets CREDIT as messages."""
    with tp.Consumer("offered") as consumer, RawEnd(consumer.endpoint) as raw:
        raw.say(hello("producer", credit_pipe=(0, 1, 1)))
        with pytest.raises(tp.Empty):
            consumer.get(0.1)
        raw.hear_of(Kind.WELCOME)
        raw.say(pack(Kind.GOODBYE, 0))
        with pytest.raises(tp.EndOfStream):
            consumer.get(5)


def test_credit_written_by_a_consumer_counts() -> None:
    """A raw consumer that writes to the pipe it was offered makes room; numbers that nobody has change nothing."""
    with tp.Producer("piped", bind=True, maxsize=1, linger=0) as producer, RawEnd(producer.endpoint) as raw:
        raw.say(hello("consumer"))
        producer.put(1, 10)
        offer = hello_of(raw.hear_of(Kind.WELCOME)).credit_pipe
        assert offer is not None
        opened = open_credit_pipe(identity(), offer)
        write_credit(opened, offer[2] + 1, 1)
        write_credit(opened, offer[2], 2)
        with pytest.raises(tp.Full):
            producer.put(2, 0.05)
        write_credit(opened, offer[2], 1)
        producer.put(2, 10)
        write_credit(opened, offer[2], 2)
        producer.flush(10)
        os.close(opened)
