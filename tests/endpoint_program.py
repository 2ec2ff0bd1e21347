"""A program at an endpoint of the kill campaign: ``python -m tests.endpoint_program FOLDER``.

It shares nothing with the others but the endpoint. It imports all it needs, says so and waits; the line that then comes
on its standard input says what it is: ``ROLE WHO MAXSIZE BINDS``. What it writes down, and when, is the campaign's business
(``campaign``): a producer notes each message before ``put`` and after it, a consumer while it is being decoded.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import time
from collections import deque
from typing import Any

import torch

import tensorpipe_ipc as tp
from tests.campaign import BEGUN, HELD, LARGE, LIFE, RETURNED, check_again, content_of, entry_of, journal

JOURNAL_WORDS = 1 << 20
LOST, WHY = 2, 3  # further words of a producer's journal: what its statistics count as lost; whether it shares memory
STOP_PRODUCERS, STOP_CONSUMERS = 0, 1  # words of the board
ENDPOINT = "campaign"
TIMEOUTS = (None, 0.3, 0.02)


def produce(who: int, maxsize: int, binds: bool, folder: str) -> None:
    """Put numbered messages until the board says that there have been enough, and wait until all are taken."""
    words, board = journal(f"{folder}/put{who}", 4), journal(f"{folder}/board", 8)
    with tp.Producer(ENDPOINT, bind=binds, maxsize=maxsize, linger=30, shared_memory="require") as producer:
        number = 0
        while not board[STOP_PRODUCERS]:
            words[BEGUN] = number + 1
            if put(producer, who, number):
                number += 1
                words[RETURNED] = number
            words[LOST] = producer._link.lost
        with contextlib.suppress(tp.PeerLost):
            producer.flush(30)
        words[LOST] = producer._link.lost


def put(producer: tp.Producer, who: int, number: int) -> bool:
    """Put one message, a large one of every second producer as a loan. False: there was no room in time."""
    content = torch.from_numpy(content_of(who, number))
    try:
        if len(content) >= LARGE and who % 2:
            specs = [who, number, tp.TensorSpec((len(content),), torch.uint8)]
            with producer.loan(specs, timeout=1.0) as tree:
                tree[2].copy_(content)
        else:
            producer.put([who, number, content], timeout=1.0)
    except tp.Full:
        return False
    return True


def consume(who: int, maxsize: int, binds: bool, folder: str) -> None:
    """Take messages and note each, until the board says that no more will come, and none does."""
    words, board = journal(f"{folder}/got{who}", JOURNAL_WORDS), journal(f"{folder}/board", 8)
    held: deque[Any] = deque()
    with tp.Consumer(ENDPOINT, bind=binds, maxsize=maxsize, shared_memory="require") as consumer:
        decode = consumer._decode_block

        def noting(metadata: bytes, payload: Any) -> Any:
            found = decode(metadata, payload)
            words[words[0] + 1] = entry_of(found[0])
            words[0] += 1
            return found

        consumer._decode_block = noting  # type: ignore[method-assign]
        while True:
            stopping = board[STOP_CONSUMERS]
            try:
                message = consumer.get(0.5 if stopping else TIMEOUTS[who % 3] or 1.0)
            except (tp.Empty, tp.EndOfStream, tp.PeerLost) as found:
                if stopping and not isinstance(found, tp.PeerLost):
                    break
                time.sleep(0 if isinstance(found, tp.Empty) else 0.001)
                continue
            if message[2].numel() >= LARGE:
                held.append(message)
            del message
            if len(held) > HELD:
                check_again(held.popleft(), words)
        del consumer._decode_block
    while held:
        check_again(held.popleft(), words)


def main() -> None:
    """Wait for the line that says what to be, and be that."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    signal.alarm(LIFE)
    faulthandler.register(signal.SIGUSR1)  # the supervisor asks where it is, when nobody goes on
    torch.set_num_threads(1)
    folder = sys.argv[1]
    print("here", flush=True)
    role, who, maxsize, binds = sys.stdin.readline().split() or sys.exit(0)
    os.close(sys.stdin.fileno())
    {"put": produce, "got": consume}[role](int(who), int(maxsize), binds == "binds", folder)


if __name__ == "__main__":
    main()
