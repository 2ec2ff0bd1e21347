"""Each example runs alone, prints what it proves, and says nothing else."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import networks
import pytest
from programs import ROOT, Done, InFork, ended, ran, ran_in_fork, started

from tensorpipe_ipc.cli import main

EXAMPLES = ROOT / "examples"
PROMISED = {
    "quickstart.py": r"(step \d: \(3, 224, 224\) torch.float32, every item as it was put\n){5}"
    r"5 messages from pid \d+ to pid \d+, and its goodbye\n",
    "replace_mp_queue.py": r"10 tensors summed by 2 workers, every sum right\n",
    "survive_a_kill.py": r"consumer and producer killed \(-9, -9\); got \[0.0, 1.0, 2.0\], nothing hangs\n",
    "fan_in.py": r"(producer \d: 50 messages, in order, none lost, none twice\n){3}",
    "fan_out.py": r"60 tasks, each done once; by each worker: \{0: \d+, 1: \d+, 2: \d+\}\n",
    "own_serializer.py": r"a mask of 1,000,000 bytes came as \d,\d{3}, and is equal\n",
    "nested_batches.py": r"boxes of each image: \[\(0, 4\), \(1, 4\), \(2, 4\), \(3, 4\)\], mean \[0.5 0.5 0.5\]\n"
    r"the images are views of the block here too, which travelled once: 49,\d{3} bytes\n",
    "onnx_worker.py": r"5 batches through ONNX Runtime, scores as torch's; lost on the way: \d\.\de-04\n",
    "loan.py": r"(batch \d: 2,408,448 bytes written by pid \d+, read in place by pid \d+\n){3}"
    r"a broken image: the loan was given back\n",
    "forward_without_copy.py": r"moved: what is left of it here has shape \(0,\)\n"
    r"back from 2 processes, every item times 4, at the same address: True\n",
    "train_digits.py": r"2 epochs of 1438 digits: [6-9]\d% of 359 others read right\n"
    r"stock loader \d+\.\d\d s, ours \d+\.\d\d s; the same weights, bit for bit: True\n",
}
SMALL = {"train_digits.py": ["2"]}  # the size at which it is tested
PAIR = ("across_unrelated_programs/producer.py", "across_unrelated_programs/consumer.py")
TWO = ("two_programs/reader.py", "two_programs/writer.py")
HOSTS = ("across_hosts/gpu_host.py", "across_hosts/data_host.py")
CAMERA = ("camera_to_model/model.py", "camera_to_model/camera.py")


def test_every_example_is_listed() -> None:
    """No example goes without a test, each has less than 60 lines, and each says what it is for."""
    paths = [path for path in EXAMPLES.rglob("*.py") if path.parent.name != "demo"]  # a program: see test_demo.py
    found = {path.relative_to(EXAMPLES).as_posix(): path.read_text() for path in paths}
    assert set(found) == {*PROMISED, *PAIR, *TWO, *HOSTS, *CAMERA}
    for name, text in found.items():
        assert len(text.splitlines()) < 60, name
        assert text.startswith('"""'), name
        assert 'if __name__ == "__main__":' in text, name


def _check(name: str, done: Done) -> None:
    assert (done.status, done.err) == (0, "")
    assert re.fullmatch(PROMISED[name], done.out)


@pytest.mark.limit(110)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "quickstart.py" else pytest.mark.kills) for name in PROMISED]
)
def test_example(name: str) -> None:
    """An example ends well, and all that it prints is what it proves. So does one that begins as a user's does."""
    _check(name, ran(str(EXAMPLES / name), *SMALL.get(name, [])))


@pytest.mark.slow
@pytest.mark.parametrize("name", PROMISED)
def test_example_with_torch_at_hand(name: str, tmp_path: Path) -> None:
    """An example ends well, and all that it prints is what it proves, where no process of it has torch to import."""
    _check(name, ran_in_fork(str(EXAMPLES / name), *SMALL.get(name, []), folder=tmp_path))


@pytest.mark.parametrize(("first", "scheme"), [(PAIR[0], "name"), (PAIR[1], "ipc")])
def test_across_unrelated_programs(first: str, scheme: str, tmp_path: Path) -> None:
    """Two programs that share nothing but the endpoint find each other, whichever starts first."""
    endpoint = [] if scheme == "name" else [f"ipc://{tmp_path}/x"]
    (second,) = set(PAIR) - {first}
    said = "".join(sorted(_both([first, *endpoint], [second, *endpoint], tmp_path)))
    assert re.fullmatch(
        r"consumer \(pid \d+\): 20 tensors taken, every sum as it was sent\n"
        r"producer \(pid \d+\): 20 tensors put, and all taken\n",
        said,
    )


def _both(one: list[str], other: list[str], folder: Path) -> list[str]:
    """Run two programs at one time. Return the output of each."""
    with (
        InFork(str(EXAMPLES / one[0]), *one[1:], folder=folder) as first,
        InFork(str(EXAMPLES / other[0]), *other[1:], folder=folder) as second,
    ):
        done = [first.end(), second.end()]
    assert [(each.status, each.err) for each in done] == [(0, "")] * 2
    return [each.out for each in done]


@pytest.mark.slow
def test_two_programs(tmp_path: Path) -> None:
    """They find shared memory by themselves, and say so."""
    reader, writer = _both([TWO[0]], [TWO[1]], tmp_path)
    assert reader == "reader: 40,000,000 bytes in 10 messages, by way of shared memory\n"
    assert writer == "writer: 40,000,000 bytes in 10 messages, by way of shared memory\n"


def _keys(folder: Path) -> tuple[list[str], list[str]]:
    """Make keys by the command line. Return the arguments of each program: its own key, and the other's."""
    gpu, data = str(folder / "gpu.key"), str(folder / "data.key")
    assert [main(["keygen", str(folder / name)]) for name in ("gpu", "data")] == [0, 0]
    return [f"{gpu}_secret", data], [f"{data}_secret", gpu]


APART = "one host" if networks.WHY_NOT else "two networks"
APART_ID = f"one host, as two networks cannot be had: {networks.WHY_NOT}" if networks.WHY_NOT else APART


@pytest.mark.slow
@pytest.mark.limit(110)
@pytest.mark.parametrize("apart", [APART], ids=[APART_ID])
def test_across_hosts(apart: str, tmp_path: Path, free_port: int) -> None:
    """As on two hosts: all tensors go over the one line between them. Over loopback where there cannot be two."""
    gpu, data = _keys(tmp_path)
    with contextlib.ExitStack() as stack:
        address, prefixes = "127.0.0.1", ([], [])
        if apart == "two networks":
            one, other = stack.enter_context(networks.two_hosts())
            address, prefixes = one.address, (one.prefix, other.prefix)
        with (
            started(str(EXAMPLES / HOSTS[0]), f"tcp://*:{free_port}", *gpu, prefix=prefixes[0]) as first,
            started(str(EXAMPLES / HOSTS[1]), f"tcp://{address}:{free_port}", *data, prefix=prefixes[1]) as second,
        ):
            done = [ended(first), ended(second)]
        assert [(each.status, each.err) for each in done] == [(0, "")] * 2
        assert done[0].out == "gpu host: 20 tensors taken, every sum as it was sent; turned away: 0\n"
        assert done[1].out == "data host: 20 tensors put, and all taken\n"
        if apart == "two networks":
            assert one.received() > 20 * 400_000


def test_camera_to_model(tmp_path: Path) -> None:
    """Every frame comes, as it was filled."""
    model, camera = _both([CAMERA[0]], [CAMERA[1], "30"], tmp_path)
    assert re.fullmatch(r"model: 29 frames of 6.2 MB, from taken to had: p50 [\d.]+ ms, p99 [\d.]+ ms\n", model)
    assert camera == "camera: 30 frames at 60 Hz, by way of shared memory\n"
