"""The limits of hostile ends. In shared memory they spoil only their own messages; no bytes make an end run code."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import struct
import time
from pathlib import Path
from typing import Any

import children
import fuzz_wire
import hostile
import pytest
import torch
import zoo
from children import PATIENCE, Child, in_thread
from inside import side_of

import tensorpipe_ipc as tp
from tensorpipe_ipc.endpoints import producer as producer_module
from tensorpipe_ipc.memory.arena import PAYLOAD_AT
from tensorpipe_ipc.memory.handover import placed
from tensorpipe_ipc.memory.segment import GROWN
from tensorpipe_ipc.shared_queue.queue_record import SLOT_BITS, SLOTS

CORPUS = Path(__file__).parents[1] / "corpus"
GOOD = 400


def _survive(seed: int, rounds: int) -> tuple[int, int]:
    """A binder takes from a good producer while a hostile one scribbles. How much was written, and how much rejected."""
    with tp.Consumer("scribbled", shared_memory="require") as consumer, Child() as good, Child() as bad:
        good.call(children.open_producer, "scribbled", shared_memory="require")
        bad.begin(hostile.scribble, "scribbled", seed, rounds)
        good.begin(children.put_numbers, 0, GOOD, "good")
        came: list[int] = []
        deadline = time.monotonic() + PATIENCE + rounds / 10
        while len(came) < GOOD or not bad.has_result():
            assert time.monotonic() < deadline, f"seed {seed}: {len(came)} of {GOOD} came"
            with contextlib.suppress(tp.TensorPipeError):
                tree = consumer.get(0.1)
                if isinstance(tree, tuple) and tree[0] == "good":
                    came.append(tree[1])
        good.result()
        assert came == list(range(GOOD)), f"seed {seed}"
        assert consumer.statistics().lost == 0
        return bad.result(), consumer.statistics().rejected


def test_who_scribbles_hurts_his_own_messages() -> None:
    """Random words over the blocks and tickets of one's own queue: every message of another producer comes, in order."""
    written, rejected = _survive(seed=1, rounds=60)
    assert written > 50
    assert rejected > 3


@pytest.mark.parametrize(
    "does",
    ["takes its messages back", "takes them back, and says that more may lie elsewhere", "fills the pipe of credits"],
)
def test_who_takes_from_a_queue_or_fills_it_stops_nobody(does: str) -> None:
    """A producer of the same user, that uses the descriptors as it likes: get ends in time, and so does close."""
    with tp.Consumer("taken") as consumer, tp.Producer("taken", linger=0) as producer:
        putting = in_thread(lambda: [producer.put(number, PATIENCE) for number in range(3)])
        assert consumer.get(PATIENCE) == 0
        putting()
        queue = side_of(producer).any_queue()
        queue.words[GROWN] = 1  # as after large messages
        consumer.get(PATIENCE)
        takes = does.startswith("takes")
        if does.endswith("elsewhere"):
            queue.words[queue.record.watch] = 1
        with contextlib.suppress(BlockingIOError):
            while True:
                if takes:
                    os.read(queue.tickets.fd, 8)
                else:
                    os.write(queue.credits.fd, bytes([5, 0, 0, 0, 0, 0, 0, 0]))
        started = time.monotonic()
        with contextlib.suppress(tp.Empty, tp.PeerLost):
            consumer.get(0.2)
        assert time.monotonic() - started < 0.2 + PATIENCE / 4
        if not takes:
            assert "pipe of credits" in consumer.statistics().last_rejection
        warns = pytest.warns(RuntimeWarning) if takes else contextlib.nullcontext()
        with warns, contextlib.suppress(tp.PeerLost):
            producer.close()


def test_a_credit_of_no_place_of_its_queue_changes_nothing_of_others() -> None:
    """A token that an end writes into the pipe of its own queue names a word there, however far it says that it is."""
    with (
        tp.Consumer("credited") as consumer,
        tp.Producer("credited", linger=0) as good,
        tp.Producer("credited", linger=0) as bad,
    ):
        content = torch.arange(100_000)
        putting = in_thread(lambda: good.put(content, PATIENCE))
        lease = consumer.get(PATIENCE)
        putting()
        putting = in_thread(lambda: bad.put("met", PATIENCE))
        assert consumer.get(PATIENCE) == "met"
        putting()
        queue = side_of(bad).any_queue()
        assert queue is not None
        assert queue.credits is not None
        word = (lease.data_ptr() - torch.frombuffer(queue.words, dtype=torch.int64, count=1).data_ptr()) // 8
        for index in range(word, word + 8):
            os.read(queue.credits.fd, 8)
            os.write(queue.credits.fd, (1 << SLOT_BITS | index - queue.record.laps & SLOTS).to_bytes(8, "little"))
        del queue
        for number in range(80):
            bad.put(number, PATIENCE)
            assert consumer.get(PATIENCE) == number
        assert torch.equal(lease, content)


def test_a_consumer_that_writes_credits_for_itself_has_no_more_than_its_turns() -> None:
    """It seems to have nothing to do, but not less than nothing, and the other one gets every second message."""
    with tp.Producer("greedy", bind=True, linger=0, maxsize=8) as producer, tp.Consumer("greedy", bind=False) as greedy:
        with tp.Consumer("greedy", bind=False) as other:
            meeting = [in_thread(functools.partial(each.get, PATIENCE)) for each in (greedy, other)]
            producer.wait_for(2, PATIENCE)
            producer.put("met", PATIENCE)
            producer.put("met", PATIENCE)
            assert [meet() for meet in meeting] == ["met", "met"]
            queue = next(iter(side_of(greedy).peers.values())).queue
            assert queue is not None
            assert queue.credits is not None
            for slot in range(100):
                os.write(queue.credits.fd, (1 << SLOT_BITS | slot % 8).to_bytes(8, "little"))
            del queue
            came = 0
            for number in range(20):
                producer.put(number, PATIENCE)
                with contextlib.suppress(tp.Empty):
                    other.get(0)
                    came += 1
            assert came >= 9


@pytest.mark.parametrize("way", ["in the block", "in the payload"])
def test_a_place_where_no_payload_begins_is_rejected(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's kernels crash on complex128 halfway between two multiples of its size: no end is to be ended by its peer."""
    with tp.Consumer("odd") as consumer, tp.Producer("odd", linger=0) as producer:
        putting = in_thread(lambda: producer.put("met", PATIENCE))
        assert consumer.get(PATIENCE) == "met"
        putting()
        if way == "in the payload":
            monkeypatch.setattr(producer_module, "placed", _placed_oddly)
        specs = {"x": tp.TensorSpec((10_000,), torch.complex128), "room": tp.TensorSpec((100_000,), torch.uint8)}
        with producer.loan(specs, timeout=PATIENCE) as made:
            made["x"].fill_(1)
            del made["room"]
        if way == "in the block":
            queue = side_of(producer).any_queue()
            assert queue is not None
            (ticket,) = queue.tickets.snapshot() or ()
            queue.words[(ticket >> 32 << 6) + PAYLOAD_AT] += 8
            del queue
        with pytest.raises((tp.Empty, tp.PeerLost)):
            consumer.get(0.1)
        assert consumer.statistics().rejected == 1
        assert re.search("no multiple of 64|a frame of 160000 bytes at 8 in", consumer.statistics().last_rejection)


def _placed_oddly(message: Any, handover: Any) -> bytes | None:
    said = placed(message, handover)
    assert said is not None
    start = 4 + struct.unpack_from("<I", said)[0]
    return said[:start] + struct.pack("<Q", struct.unpack_from("<Q", said, start)[0] + 8) + said[start + 8 :]


@pytest.mark.kills
@pytest.mark.limit(600)
@pytest.mark.parametrize("seed", range(2, 12))
def test_who_scribbles_long_hurts_his_own_messages(seed: int) -> None:
    """The same, much more of it."""
    written, _ = _survive(seed, 600)
    assert written > 500


@pytest.mark.parametrize("target", fuzz_wire.TARGETS)
def test_the_corpus_ends_as_it_did(target: str) -> None:
    """Damaged messages that were kept end in what they ended in then: nothing is let in that was refused."""
    found = [(end, frames) for which, end, frames in fuzz_wire.kept(CORPUS) if which == target]
    assert len(found) > 20
    ending = fuzz_wire.TARGETS[target][1]
    fuzz_wire.forget_schemas()
    assert [ending(frames) for _, frames in found] == [end for end, _ in found]


@pytest.mark.parametrize("target", [target for target in fuzz_wire.TARGETS if target != "frames"])
def test_the_fuzzer_gets_deep(target: str) -> None:
    """Blocks, published statuses and rendezvous files: of some thousands of damaged ones each ends in a tree or our errors."""
    ends = fuzz_wire.fuzz(2000, seed=3, target=target)
    ways = {"statuses": ("status", "nothing"), "files": ("rendezvous", "nothing")}
    for end in ways.get(target, ("tree", "ProtocolError", "UnknownSerializer")):
        assert ends[end] > 10, ends


@pytest.mark.parametrize(
    ("endpoint", "shared_memory"),
    [
        ("audited", "require"),
        ("audited", "off"),
        ("tcp://127.0.0.1:*", "require"),
        ("tcp://127.0.0.1:*", "off"),
        ("inproc://audited", "auto"),
    ],
)
def test_nothing_is_unpickled(endpoint: str, shared_memory: str) -> None:
    """Python's own audit events: while the whole zoo crosses, nothing is unpickled, compiled or run, by any serializer.

    torch_save too: its files hold a pickle, which torch reads with an interpreter of its own, and looks no class up by name.
    """
    with Child() as child:
        for serializer in ("raw", "numpy", "torch_save"):
            came, seen = child.call(hostile.zoo_under_audit, list(zoo.ZOO), serializer, endpoint, shared_memory)
            assert seen == ["pickle.find_class"]
            assert came > len(zoo.ZOO) / 2
