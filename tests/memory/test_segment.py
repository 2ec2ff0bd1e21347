"""A segment is sealed, sparse, verified where it is attached, and refused with sizes and a remedy."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import multiprocessing
import os
import pickle
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
from crash_points import told_by_child

from tensorpipe_ipc.errors import SharedMemoryError
from tensorpipe_ipc.memory.segment import DEFAULT_SIZE, MINIMUM_SIZE, PAGE, VERSION, Segment, read_head, segment_at
from tensorpipe_ipc.owned_fd import OwnedFd


def test_a_segment_is_large_and_costs_a_page() -> None:
    segment = Segment.create()
    assert segment.size == DEFAULT_SIZE
    assert segment.resident() <= PAGE
    segment.words[(DEFAULT_SIZE >> 3) - 1] = 7  # the very last word is there
    assert segment.octets[DEFAULT_SIZE - 8] == 7


@pytest.mark.parametrize("change", [lambda fd: os.ftruncate(fd, 0), lambda fd: os.ftruncate(fd, DEFAULT_SIZE * 2)])
def test_nobody_can_resize_it(change: Any) -> None:
    segment = Segment.create()
    with pytest.raises(PermissionError):
        change(segment.descriptor)
    with pytest.raises(PermissionError):
        fcntl.fcntl(segment.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_what_one_mapping_writes_another_reads() -> None:
    segment = Segment.create(MINIMUM_SIZE)
    other = Segment.attach(segment.descriptor)
    segment.words[1000] = 42
    assert other.words[1000] == 42


def unsealed(size: int) -> Any:
    descriptor = os.memfd_create("x", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    return descriptor


SEALS = {"shrinking": fcntl.F_SEAL_SHRINK, "growing": fcntl.F_SEAL_GROW, "further seals": fcntl.F_SEAL_SEAL}


def sealed_with(size: int, head: Any = b"", without: str = "") -> Any:
    descriptor = unsealed(size)
    os.pwrite(descriptor, head, 0)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, sum(seal for name, seal in SEALS.items() if name != without))
    return descriptor


def head_of(size: int, magic: bytes = b"TPIPESEG", version: Any = VERSION) -> Any:
    return magic + version.to_bytes(8, sys.byteorder) + size.to_bytes(8, sys.byteorder)


def test_what_is_right_in_all_is_attached() -> None:
    descriptor = sealed_with(MINIMUM_SIZE, head_of(MINIMUM_SIZE))
    assert Segment.attach(descriptor).size == MINIMUM_SIZE
    assert read_head(descriptor) == (MINIMUM_SIZE, 0)
    os.pwrite(descriptor, (5).to_bytes(8, sys.byteorder), 24)
    assert read_head(descriptor) == (MINIMUM_SIZE, 5)
    os.close(descriptor)


def test_it_is_as_large_as_was_said() -> None:
    descriptor = sealed_with(MINIMUM_SIZE, head_of(MINIMUM_SIZE))
    with pytest.raises(SharedMemoryError, match=f"has {MINIMUM_SIZE} bytes, {2 * MINIMUM_SIZE} were expected"):
        Segment(OwnedFd.fromfd(descriptor), 2 * MINIMUM_SIZE)  # which closes it


@pytest.mark.parametrize("without", SEALS)
def test_each_seal_counts(without: Any) -> None:
    descriptor = sealed_with(MINIMUM_SIZE, head_of(MINIMUM_SIZE), without)
    with pytest.raises(SharedMemoryError, match="not sealed"):
        Segment.attach(descriptor)
    os.close(descriptor)


@pytest.mark.parametrize(
    "head",
    [
        head_of(MINIMUM_SIZE, magic=b"TPIPESEH"),
        head_of(MINIMUM_SIZE, version=0),
        head_of(MINIMUM_SIZE, version=VERSION + 1),
        head_of(MINIMUM_SIZE - 1),
        head_of(MINIMUM_SIZE + 1),
    ],
    ids=["magic", "an older version", "a newer version", "a smaller size", "a larger size"],
)
def test_each_word_of_the_head_counts(head: Any) -> None:
    descriptor = sealed_with(MINIMUM_SIZE, head)
    with pytest.raises(SharedMemoryError, match=f"no segment of version {VERSION}"):
        Segment.attach(descriptor)
    assert read_head(descriptor) == (0, 0)
    os.close(descriptor)


@pytest.mark.parametrize(("size", "found"), [(31, (0, 0)), (32, (32, 0))])
def test_a_head_is_looked_at_where_there_is_one(size: int, found: Any) -> None:
    descriptor = sealed_with(size, head_of(size))
    assert read_head(descriptor) == found
    os.close(descriptor)


@pytest.mark.parametrize(
    ("descriptor", "words"),
    [
        (lambda: os.open("/dev/null", os.O_RDWR), "not a memfd"),
        (lambda: unsealed(MINIMUM_SIZE), "not sealed"),
        (lambda: sealed_with(4096), f"has 4096 bytes, {MINIMUM_SIZE} were expected"),
        (
            lambda: sealed_with(MINIMUM_SIZE - PAGE, head_of(MINIMUM_SIZE - PAGE)),
            f"has {MINIMUM_SIZE - PAGE} bytes, {MINIMUM_SIZE} were expected",
        ),
        (lambda: sealed_with(MINIMUM_SIZE), f"no segment of version {VERSION}"),
        (
            lambda: sealed_with(MINIMUM_SIZE, b"TPIPESEG" + bytes([VERSION + 1] + [0] * 7)),
            f"no segment of version {VERSION}",
        ),
    ],
    ids=["no memfd", "not sealed", "far too small", "too small by a page", "no magic", "another version"],
)
def test_something_else_is_not_attached(descriptor: int, words: Any) -> None:
    opened = descriptor()
    with pytest.raises(SharedMemoryError, match=words):
        Segment.attach(opened)
    os.close(opened)


def limited(limit: int, nbytes: int) -> Any:
    """Make a segment in a process with that limit. Return its size or its error, as text."""

    def make() -> Any:
        resource.setrlimit(getattr(resource, limit), (nbytes, nbytes))
        return Segment.create().size

    return told_by_child(make)


@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_FSIZE"])
def test_under_a_limit_it_is_smaller_and_under_a_small_one_refused_with_the_remedy(limit: int) -> None:
    size = int(limited(limit, 8 << 30))
    assert 1 << 30 <= size <= (4 << 30 if limit == "RLIMIT_AS" else 8 << 30)  # addresses are left for the program
    refused = limited(limit, 200 << 20)
    assert refused.startswith("SharedMemoryError")
    assert str(MINIMUM_SIZE) in refused
    assert "ulimit" in refused


@pytest.mark.parametrize(("flags", "is_refused"), [(2, True), (2 | 4, False)], ids=["all", "what is used"])
def test_a_process_that_locks_what_it_maps_is_refused_what_all_would_become_memory(flags: Any, is_refused: Any) -> None:
    def make() -> Any:
        assert ctypes.CDLL(None).mlockall(flags) == 0  # MCL_FUTURE, MCL_ONFAULT
        return Segment.create(MINIMUM_SIZE).resident()

    said = told_by_child(make)
    if is_refused:
        assert said.startswith("SharedMemoryError")
        assert "MCL_ONFAULT" in said
    else:
        assert said == str(PAGE) or "ulimit -l" in said


@pytest.mark.parametrize("page", [PAGE, 64 << 10])  # where the system's are larger, the kernel refuses a part of one
def test_punched_pages_cost_nothing_and_read_as_zeros(page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Segment, "page", page)
    segment = Segment.create(MINIMUM_SIZE)
    segment.octets[page : 64 * page] = 7
    before = segment.resident()
    segment.punch(page + 1, 64 * page - 1)  # whole pages only
    assert before - segment.resident() == 61 * page
    ends = [2 * page, 63 * page - 1, 2 * page - 1, 63 * page]
    assert segment.octets[ends].tolist() == [0, 0, 7, 7]


def test_a_process_that_locks_what_it_maps_gives_pages_back_and_never_those_of_another_file(tmp_path: Path) -> None:
    def punch() -> Any:
        assert ctypes.CDLL(None).mlockall(2 | 4) == 0  # MCL_FUTURE, MCL_ONFAULT
        segment = Segment.create(MINIMUM_SIZE)
        segment.octets[PAGE : 64 * PAGE] = 7
        before = segment.resident()
        given = segment.punch(PAGE, 33 * PAGE), (before - segment.resident()) // PAGE, int(segment.octets[PAGE])
        (tmp_path / "file").write_bytes(bytes([1]) * 64 * PAGE)
        with open(tmp_path / "file", "rb+") as file:
            os.dup2(file.fileno(), segment.descriptor)
        return *given, segment.punch(33 * PAGE, 64 * PAGE), (tmp_path / "file").read_bytes().count(1) // PAGE

    assert told_by_child(punch) == "(True, 32, 0, False, 64)"


def test_it_is_kept_out_of_core_files() -> None:
    segment = Segment.create(MINIMUM_SIZE)
    with open("/proc/self/smaps", encoding="utf-8") as smaps:
        entry = smaps.read().split("memfd:tensorpipe_ipc", 1)[1].split("memfd:", 1)[0]
    assert " dd" in next(line for line in entry.splitlines() if line.startswith("VmFlags"))
    assert segment.memory.madvise  # still mapped


def test_it_holds_one_descriptor_also_where_addresses_count_as_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with vm.overcommit_memory=2: there it may hold a second one, and works."""
    before = len(os.listdir("/proc/self/fd"))
    segment = Segment.create(MINIMUM_SIZE)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    monkeypatch.setattr(
        "tensorpipe_ipc.memory.segment.MAP_NORESERVE", mmap.MAP_SHARED | 1 << 19
    )  # the kernel refuses that
    again = Segment.attach(segment.descriptor)
    again.words[1000] = 41
    assert segment.words[1000] == 41


def test_it_is_pickled_only_while_spawning() -> None:
    with pytest.raises(RuntimeError, match="inheritance"):
        pickle.dumps(Segment.create(MINIMUM_SIZE))


def answer(segment: Any) -> None:
    segment.words[2000] = segment.words[1000] + 1


@pytest.mark.parametrize("method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.kills)])
def test_a_child_has_it(method: str) -> None:
    segment = Segment.create(MINIMUM_SIZE)
    segment.words[1000] = 41
    process = multiprocessing.get_context(method).Process(target=answer, args=(segment,))
    process.start()
    process.join(50)  # it imports torch
    assert process.exitcode == 0
    process.close()
    assert segment.words[2000] == 42


def test_the_mapping_outlives_the_segment_object_under_an_array() -> None:
    array = Segment.create(MINIMUM_SIZE).octets[PAGE : 2 * PAGE]
    array[:] = 3
    assert array.sum() == 3 * PAGE
    assert mmap.PAGESIZE >= PAGE


def test_which_segment_an_address_lies_in() -> None:
    segment = Segment.create(MINIMUM_SIZE)
    start = segment.octets.ctypes.data
    for address in (start, start + MINIMUM_SIZE - 1):
        assert segment_at(address) is segment
    for address in (start - 1, start + MINIMUM_SIZE):
        assert segment_at(address) is not segment
