"""``make demo`` as its users run it, and the parts that it is made of."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest
import torch
from guard import runtime_folder
from PIL import Image
from programs import ended, left_of, ran_in_fork, spawning_by_fork, started
from zoo import bits

import tensorpipe_ipc as tp
from examples.demo import anatomy, filters, pictures
from examples.demo.__main__ import main
from examples.demo.ledger import Ledger
from examples.demo.pipeline import Job, Pipeline
from examples.demo.report import percentile
from tensorpipe_ipc.cli.failure import Failure
from tensorpipe_ipc.serializers import serializer_named
from tensorpipe_ipc.wire.message import encode

DEMO = ("-m", "examples.demo")


def _check(out: str, items: int) -> None:
    assert f"All {2 * items} results equal this process's own, bit for bit:\n" in out
    assert re.search(rf"images and results +{items} +[\d.]+ +[\d.]+ +[\d.,]+ +[\d.,]+\n", out)
    for process in ("reader", "worker", "main"):
        assert re.search(rf"^{process} +\d+ +[\d,]+ +[\d,]+ *$", out, re.MULTILINE), process
    for hop in ("reader to worker", "worker to main"):
        assert re.search(rf"^{hop} +\w+ +[\d,]+ +\d+ +[\d,]+ +[\d,]+ *$", out, re.MULTILINE), hop
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.slow
def test_the_demo_shows_a_message_and_that_all_results_are_right(tmp_path: Path) -> None:
    """As ``make demo`` runs it, and with ``--wire``, which shows the frames of a message, with what each part means."""
    done = ran_in_fork(*DEMO, "--items", "2", "--wire", folder=tmp_path)
    assert (done.status, done.err) == (0, "")
    _check(done.out, 2)
    assert "serializer raw" in done.out
    assert "over ipc:///" in done.out
    for line in (
        "0 0 54 50 49 43 magic TPIC",
        "0 5 04 kind 4: DATA",
        "serializer raw",
        "key 'image'",
        "leaf 0: dtype 2: torch.uint8",
        "ab 01 00 00 00 00 00 00 leaf 0: size 427",
        "value 0",
        "payload: 819,840 bytes, by raw",
    ):
        assert line in re.sub(r" +", " ", done.out.replace("·", ""))


@pytest.mark.limit(110)
@pytest.mark.parametrize(
    ("serializer", "endpoint", "shown"),
    [
        ("numpy", "tcp", "tcp://127.0.0.1:"),
        pytest.param("torch_save", "a-name", "ipc://{}/a-name-results.sock", marks=pytest.mark.kills),
    ],
)
def test_own_pictures_over_another_endpoint(
    serializer: str, endpoint: str, shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pictures of the user's own, of any size and mode; files that are none, or half of one, are named and skipped."""
    Image.new("RGB", (40, 30), (200, 100, 50)).save(tmp_path / "a.png")
    Image.effect_noise((33, 7), 80).save(tmp_path / "b.png")
    Image.new("RGBA", (1, 1), (1, 2, 3, 4)).save(tmp_path / "c.png")
    whole = (tmp_path / "b.png").read_bytes()
    (tmp_path / "half.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "notes.txt").write_text("no picture")
    arguments = ["--serializer", serializer, "--endpoint", endpoint, "--items", "6", "--images", str(tmp_path)]
    with spawning_by_fork():
        assert main(arguments) == 0
    said = capsys.readouterr()
    assert said.err == ""
    _check(said.out, 6)
    assert f"over {shown.format(runtime_folder())}" in said.out
    assert f"serializer {serializer}" in said.out
    assert "skipped half.png: " in said.out
    assert "skipped notes.txt: cannot identify image file 'notes.txt'\n" in said.out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--serializer", "pickle"), r"unknown serializer 'pickle' \(known: numpy, raw, torch_save\).*"),
        (("--endpoint", "tcp://1.2.3.4:5"), "--endpoint tcp://1.2.3.4:5: give ipc, tcp, or a name of .*"),
        (("--images", "/nowhere/at/all"), "--images /nowhere/at/all: there is no such folder"),
    ],
)
def test_it_says_what_is_wrong(arguments: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The demo reports anything that it cannot do in one line, with status 1."""
    status = main(arguments)
    said = capsys.readouterr()
    assert (status, said.out) == (1, "")
    assert re.fullmatch(f"demo: {sentence}\n", said.err)


@pytest.mark.parametrize("items", ["0", "x"])
def test_wrong_usage_is_2(items: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An argument that cannot be: usage, and status 2."""
    with pytest.raises(SystemExit) as ended:
        main(["--items", items])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("usage: demo")


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A library that is not there: its name, and how it is had."""
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("demo: this needs PIL: make demo installs it, ")


def test_an_empty_folder(tmp_path: Path) -> None:
    """A folder without a picture is an error that says so, and which files were tried."""
    with pytest.raises(Failure, match="no picture in it, it is empty"):
        pictures.in_folder(str(tmp_path), 1)
    (tmp_path / "x.jpg").write_text("no picture")
    with pytest.raises(Failure, match="not readable as one: x.jpg: cannot identify"):
        pictures.in_folder(str(tmp_path), 1)


@pytest.fixture
def picture(tmp_path: Path) -> pictures.Picture:
    """A small one."""
    path = tmp_path / "noise.png"
    Image.effect_noise((33, 7), 80).save(path)
    return pictures.Picture("image", str(path))


@pytest.mark.limit(110)
@pytest.mark.parametrize(
    ("name", "when"), [pytest.param("reader", "starting", marks=pytest.mark.kills), ("worker", "working")]
)
def test_a_killed_child_is_named(name: str, when: str, picture: pictures.Picture) -> None:
    """A child that is killed, as it starts or in the middle, fails the demo with its name; nothing is left of the others."""
    job = Job([picture], 1_000_000, 0, "raw", "frames", "results")
    killed: list[int] = []
    with spawning_by_fork(), pytest.raises(Failure) as failed:
        _receive_and_kill(job, name, when, killed)
    assert str(failed.value).startswith(f"the {name} (pid {killed[0]}) was killed by SIGKILL; ")


def _receive_and_kill(job: Job, name: str, when: str, killed: list[int]) -> None:
    with tp.Consumer(job.results, accept=["raw"], maxsize=8) as consumer, Pipeline(job, consumer) as pipeline:
        if when == "working":
            assert next(iter(pipeline))["number"] == 0
        killed += [child.pid for child in pipeline.children if child.name == name]
        os.kill(killed[0], signal.SIGKILL)
        list(pipeline)


@pytest.mark.limit(110)
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.kills)]
)
def test_an_interrupted_demo_leaves_nothing(
    number: signal.Signals, status: int, picture: pictures.Picture, tmp_path: Path
) -> None:
    """Ctrl-C, which goes to all its processes, and SIGTERM to the first end it without a word and without a rest."""
    with started(*DEMO, "--items", "1000000", "--images", str(tmp_path)) as program:
        assert program.stdout is not None
        program.stdout.readline()
        if number == signal.SIGINT:
            os.killpg(program.pid, number)
        else:
            os.kill(program.pid, number)
        done = ended(program)
        assert left_of(program.pid) == []
    assert (done.status, done.err) == (status, "")


def test_filters_agree_bit_for_bit() -> None:
    """conv2d and whole numbers give the same bits, also for the brightest and for the smallest picture."""
    for image in (
        bits(torch.uint8, 3, 31, 17),
        torch.full((3, 9, 9), 255, dtype=torch.uint8),
        bits(torch.uint8, 3, 1, 1),
    ):
        assert torch.equal(filters.by_conv2d(image), filters.by_whole_numbers(image))


def test_a_wrong_result_is_found(picture: pictures.Picture) -> None:
    """One item that differs in one bit, or comes in another's place, fails the demo and is named."""
    job = Job([picture], 2, 0, "raw", "", "")
    right = filters.by_conv2d(pictures.decode(job.picture(0)))
    wrong = right.clone()
    wrong.view(torch.int32)[0, 0, 0] ^= 1
    for number, result in ((0, wrong), (1, right)):
        ledger = Ledger(job)
        ledger.enter({"number": number, "result": result, "read_ns": 1, "taken_ns": 2, "sent_ns": 3})
        with pytest.raises(
            Failure, match=rf"1 of 1 results are wrong or out of order: item {number} \(image .*noise.png\)"
        ):
            ledger.check()
    with pytest.raises(Failure, match="0 results arrived, of 2"):
        Ledger(job).check()


@pytest.mark.parametrize("serializer", ["raw", "numpy", "torch_save"])
def test_anatomy_explains_every_byte(serializer: str) -> None:
    """The parts of a message are its frames, without a gap: views, orders, keys, names, odd values and all."""
    base = torch.arange(24, dtype=torch.float32)
    tree = {
        "views": [base, base.view(4, 6)[:, ::2]],
        "order": bits(torch.int16, 2, 3, 4).transpose(0, 2),
        "large": torch.zeros(1 << 17, dtype=torch.uint8),
        3: (None, True, 1 << 70, 1 + 2j, "text", b"bytes", torch.float16, torch.Size([1, 2]), torch.device("cpu")),
        "storage": base[:2].clone().untyped_storage(),
    }
    frames = [bytes(frame) for frame in encode(tree, serializer_named(serializer)).frames(1)]
    found = anatomy.parts(frames)
    for index, frame in enumerate(frames):
        own = [part for part in found if part.frame == index]
        assert b"".join(part.data for part in own) == frame
        assert [part.start for part in own] == [sum(len(part.data) for part in own[:at]) for at in range(len(own))]
    assert all(part.meaning for part in found)


def test_percentiles_are_of_the_nearest_rank() -> None:
    """A percentile is one of the values: the smallest that enough of them do not exceed."""
    assert [percentile(range(1, 101), share) for share in (0.5, 0.99, 1.0)] == [50, 99, 100]
    assert percentile([7], 0.5) == 7
