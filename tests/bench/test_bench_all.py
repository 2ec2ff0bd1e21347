"""``python -m bench all``: every peer behind one interface, who is missing is listed, and the page says what was found."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from programs import ended, outliving, ran_in_fork, started

from bench import all as everything
from bench.all import deaths, fans, field, held, leaves, sizes
from bench.all.field import Field
from bench.all.links import Shape
from bench.all.peers import FLOORS, OURS, PEERS, Peer
from bench.all.programs import ONE_WAY, STREAM, Message
from bench.all.tree import PeerFailed
from bench.page import results, tables
from bench.page.words import headline
from bench.progress import Steps
from bench.queue.rivals import Ours, pattern
from bench.wanted import install, wanted

ROOT = Path(__file__).resolve().parents[2]
STANDARD = ("mp.Queue, NumPy", "mp.Pipe, NumPy", "SharedMemory slot", "numpy by hand")
ABSENT = Peer("absent", "nobody has it", lambda shape: None, package="no_such_package_of_that_name")


class _Damaging(Ours):
    def fresh(self, nbytes: int) -> Any:
        return pattern(nbytes).clone().fill_(9)


def _quiet(_: str) -> None:
    """Nobody is told."""


@pytest.mark.slow
def test_peers_of_the_standard_library_and_ours() -> None:
    """Each is measured in rounds with the others; who is not here is listed with the reason; who damages is out."""
    peers = {
        **{name: PEERS[name] for name in (*FLOORS, OURS, *STANDARD)},
        "absent": ABSENT,
        "damaging": Peer("damaging", "", lambda shape: _Damaging(shape.bound)),
    }
    with Field(list(peers), _quiet, peers) as all_:
        assert set(all_.missing) == {"absent"}
        assert "no_such_package_of_that_name" in all_.missing["absent"]
        all_.begin("here")
        standing = all_.stand(Shape(64, 4000))
        found = all_.rounds(standing, lambda tree, count: sizes.one_way(tree, Message(4000), count), 0, 0, 3, "one way")
        assert set(found) == {*FLOORS, OURS, *STANDARD}
        rows = list(field.rows_of(found, item="one way", nbytes=4000))
        assert all(row["us"]["median"] > 0 < row["to_ours"]["median"] and row["rounds"] >= 1 for row in rows)
        ((failed),) = all_.failed
        assert (failed["peer"], failed["item"]) == ("damaging", "here one way")
        assert "damaged" in failed["reason"]
        assert "damaging" not in all_.trees
        for name in (OURS, *STANDARD):
            assert len(all_.trees[name].run(STREAM, Message(4000), 5)) == 2
        assert list(all_.trees[OURS].run(ONE_WAY, Message(1000, 3), 2)[1])  # dicts


def test_what_wedges_is_ended_and_leaves_nothing() -> None:
    """A tree that is killed says what it left in /dev/shm, and removes it: of ours nothing, of a named block one file."""
    with Field([OURS, "SharedMemory slot"], _quiet) as all_:
        all_.stand(Shape(4, 4000))
        folder = Path(tempfile.gettempdir())
        before = set(folder.glob("bench-*"))
        assert all_.trees.pop(OURS).kill() == []
        (left,) = all_.trees.pop("SharedMemory slot").kill()
        assert not Path(left).exists()
        assert len(before - set(folder.glob("bench-*"))) == 2


def _recorded() -> results.Results:
    """A small run as it is recorded, with one peer of each sort."""
    us = {"median": 80.0, "lowest": 70.0, "highest": 90.0}
    ratio = {"median": 1.0, "lowest": 1.0, "highest": 1.0}
    rows: list[dict[str, Any]] = []
    for factor, name in enumerate(("pipe, 8 bytes", OURS, "torch Queue, fd", "mp.Queue, NumPy"), 1):
        times = {key: value * factor for key, value in us.items()}
        to_ours = {key: value * factor / 2 for key, value in ratio.items()}
        shared = {"peer": name, "us": times, "to_ours": to_ours, "rounds": 3, "messages": 9}
        rows += [{**shared, "item": item, "nbytes": n} for item in ("one way", "stream") for n in (400, 4_000_000)]
        if factor > 1:
            rows += [{**shared, "item": "trees", "leaves": n, "nbytes": 1000 * n} for n in (1, 100)]
            rows += [{**shared, "item": "fans", "nbytes": 4000, "senders": n, "receivers": 1} for n in (1, 4)]
            rows += [
                {"item": "held", "peer": name, "held": n, "descriptors": n, "memory": 40_000 * n} for n in (1, 100)
            ]
            rows.append(
                {"item": "deaths", "peer": name, "tries": 3, "consumer": "hangs", "producer": "<on>", "left": 0}
            )
    names = list(dict.fromkeys(row["peer"] for row in rows))
    none = "cannot be imported: No module named 'zenoh'"
    peers = [
        {"peer": name, "family": PEERS[name].family, "version": "torch 2.13", "note": "as it is", "missing": missing}
        for name, missing in (*((name, "") for name in names), ("zenoh", none))
    ]
    failed = [{"peer": "gloo", "item": "fans 1 to 2", "reason": "no answer within 60 s"}]
    host = {"processor": "one", "cores": "2", "python": "3.11"}
    return results.of("all", "python -m bench all", host, rows, 0.5, peers=peers, failed=failed)


@pytest.mark.slow
def test_the_page(tmp_path: Path) -> None:
    """From recorded results: every section with the command, all who are missing or failed, pictures, escaped words."""
    found = _recorded()
    name = results.name_of(found)
    (tmp_path / "run.json").write_text(json.dumps(found))
    # In a process of its own: matplotlib keeps its fonts open.
    code = "import sys; from bench.page import results, write; write(results.read(sys.argv[1]), sys.argv[2])"
    done = ran_in_fork("-c", code, str(tmp_path / "run.json"), str(tmp_path), folder=tmp_path)
    assert done.status == 0, done.err
    page, text = (tmp_path / f"{name}.html").read_text(), (tmp_path / f"{name}.md").read_text()
    assert results.read(tmp_path / f"{name}.json") == json.loads(json.dumps(found))
    for shown in (page, text):
        for words in ("No module named", "no answer within 60 s", "One way", "When a process is killed", "80 µs"):
            assert words in shown
        assert shown.count("python -m bench all") >= 6  # beside every section's numbers
    assert page.count("<svg") == 5
    assert "&lt;on&gt;" in page
    pictures = list((tmp_path / name).glob("*.svg"))
    assert {f"{name}/{picture.name}" in text for picture in pictures} == {True}
    assert "(1.5×; 1.5..1.5)" in tables.markdown(tables.one_way(found))
    table = tables.markdown(tables.headline(found))
    assert "| **ours** | **160 µs** | **160 µs** | **160 µs** |" in table
    assert "| torch Queue, fd | 240 µs (1.5×) |" in table
    assert "zenoh" not in table
    first = headline(found)
    assert first in text
    assert (
        "a tensor of 4 MB in 160 µs (torch.multiprocessing.Queue: 240 µs, 1.5 times as long) and one of 400 B" in first
    )
    assert text.index(first) < text.index(table) < text.index("## One way") < text.index("## Who took part")
    assert "| torch Queue, fd | torch 2.13 |" in text
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(ValueError, match="holds no results"):
        results.read(tmp_path / "other.json")


def test_the_floor_is_a_wake_up_and_a_memcpy() -> None:
    """One row tells the least that the machine takes: both together."""
    found = _recorded()
    more = {
        "item": "one way",
        "peer": "one memcpy",
        "nbytes": 400,
        "us": {"median": 5.0, "lowest": 5.0, "highest": 5.0},
    }
    table = tables.short({**found, "rows": [*found["rows"], more]})
    assert list(table.rows[-1])[:3] == ["the machine's floor", "85 µs", "-"]


@pytest.mark.slow
def test_a_part_of_a_run_has_its_page(tmp_path: Path) -> None:
    """A page of a partial run leaves out every item without a figure of ours, and shows the rest."""
    found = _recorded()
    for left_out in ("one way", OURS):
        part = {**found, "rows": [row for row in found["rows"] if left_out not in (row["item"], row["peer"])]}
        (tmp_path / f"{left_out}.json").write_text(json.dumps(part))
    code = (
        "import sys; from bench.page import results, write; [write(results.read(at), at[:-5]) for at in sys.argv[1:]]"
    )
    done = ran_in_fork("-c", code, *map(str, tmp_path.glob("*.json")), folder=tmp_path)
    assert done.status == 0, done.err
    for left_out in ("one way", OURS):
        (page,) = (tmp_path / left_out).glob("*.md")
        text = page.read_text()
        assert "A part of the comparison" in text
        assert ("## One way" in text) is (left_out == OURS)
        assert "| torch Queue, fd |" in text


def test_why_a_peer_is_not_installed() -> None:
    """Each is installed by itself; of who cannot be, the installer's last error is kept, also where time was over."""
    installs = [
        sys.executable,
        "-c",
        "import sys; sys.exit('ERROR: first\\nERROR: no such thing' if sys.argv[1] == 'no>=1' else 0)",
    ]
    assert install(["yes>=2", "no>=1"], installs) == {"no": "no such thing"}
    assert install(["slow"], ["sh", "-c", "sleep 100 & sleep 100"], 0.1) == {
        "slow": "the time for installing peers was over"
    }


def test_the_installers_reason_reaches_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page shows why Python cannot import a peer. It adds the reason of pip, if pip did not install it."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    missing = {"zenoh": "cannot be imported: No module named 'zenoh'", "gloo": "cannot be imported: libgloo"}
    assert everything.reasons(missing) == missing
    (tmp_path / "bench-not-installed.json").write_text('{"eclipse-zenoh": "No matching distribution"}')
    assert everything.reasons(missing) == {
        "zenoh": "cannot be imported: No module named 'zenoh'; pip install eclipse-zenoh: No matching distribution",
        "gloo": "cannot be imported: libgloo",
    }


def test_versions_are_told_of_what_a_peer_comes_with() -> None:
    """A peer's own package, else that of which it is a part; nothing of what is not installed."""
    assert everything.version_of(PEERS["gloo"]).partition("+")[0] == f"torch {torch.__version__.partition('+')[0]}"
    assert everything.version_of(PEERS["SharedMemory slot"]) == f"Python {platform.python_version()}"
    assert everything.version_of(ABSENT) == ""


def test_how_far_a_run_is() -> None:
    """A step's part is what it is expected to take; within it the clock counts, up to its end."""
    shown: list[tuple[float, str]] = []
    steps = Steps({"a": 0.001, "b": 3.0}, lambda part, what: shown.append((part, what)))
    steps.begin("a")
    time.sleep(0.002)
    steps.tell("long")
    steps.begin("b")
    steps.tell("next")
    assert [what for _, what in shown] == ["long", "next"]
    assert shown[0][0] == pytest.approx(0.001 / 3.001)
    assert shown[0][0] <= shown[1][0] < 1


def test_what_make_bench_asks_for() -> None:
    """Only what the extra of the peers wants here, and without conditions."""
    declared = ["torch>=2", "rich>=13; extra == 'cli'", "ray>=2.44; sys_platform == 'linux' and extra == 'peers'"]
    assert wanted([*declared, "pynng>=0.8; sys_platform == 'win32' and extra == 'peers'"]) == ["ray>=2.44"]


@pytest.mark.kills
@pytest.mark.limit(300)
def test_the_command_writes_results_and_page(tmp_path: Path) -> None:
    """A short run of everything with some of the peers, then of growth, then of the page alone."""
    names = [word for name in ("mp.Pipe, NumPy", "torch Queue, file") for word in ("--peer", name)]
    code = (
        "from bench import __main__ as command\n"
        "from bench.all import sizes\n"
        "from bench.growth import items\n"
        "sizes.SIZES = (400, 40_000)\n"
        "items.SIZES, items.LEAVES, items.LEASES, items.DEPTHS, items.PEERS = (8, 400), (1, 10), (1, 10), (1, 10), (2, 3)\n"
        f"command.main({['all', '--budget', '1', '--folder', str(tmp_path), *names]!r})\n"
        f"command.main({['growth', '--scale', '0.001', '--folder', str(tmp_path)]!r})\n"
        f"import pathlib; found = str(min(pathlib.Path({str(tmp_path)!r}).glob('*[!h].json')))\n"
        f"command.main(['page', found, '--folder', {str(tmp_path / 'again')!r}])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    everything, growth = sorted(map(results.read, tmp_path.glob("*.json")), key=lambda found: str(found["kind"]))
    assert {row["item"] for row in everything["rows"]} == {"one way", "stream", "trees", "held", "fans", "deaths"}
    assert [row for row in everything["rows"] if row["item"] == "deaths" and row["peer"] == OURS] == [
        {"item": "deaths", "peer": OURS, "tries": deaths.TRIES, "consumer": "goes on", "producer": "goes on", "left": 0}
    ]
    assert len(results.rows(everything, "held", peer=OURS)) == len(held.HELD)
    assert {row["leaves"] for row in results.rows(everything, "trees")} == set(leaves.LEAVES)
    assert len(results.rows(everything, "fans", peer=OURS)) == len(fans.SHAPES)
    assert {row["with"] for row in growth["rows"]} == {"size", "leaves", "leases", "depth", "peers", "messages"}
    assert len(list(tmp_path.glob("*.html"))) == len(list(tmp_path.glob("*.md"))) == 2
    assert len(list((tmp_path / "again").glob("*.html"))) == 1


def test_who_does_not_answer_is_told() -> None:
    """A task for processes that have ended fails at once."""
    with Field([OURS], _quiet) as all_:
        tree = all_.trees[OURS]
        for process in tree.processes():
            process.kill()
        with pytest.raises(PeerFailed, match="processes ended"):
            tree.run(ONE_WAY, Message(8), 1)


@pytest.mark.kills
@pytest.mark.limit(240)
@pytest.mark.parametrize("everybody", [True, False])
def test_ctrl_c_leaves_nothing(everybody: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of a run ends it with status 130 and no traceback, and takes all trees and folders with it."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    peers = [word for name in STANDARD for word in ("--peer", name)]
    with started("-m", "bench", "all", "--folder", str(tmp_path / "results"), *peers) as program:
        assert program.stderr is not None
        said = ""
        while "one way" not in said:
            said = program.stderr.readline()
            assert said, "it ended"
        children = [child.pid for child in psutil.Process(program.pid).children(recursive=True)]
        assert len(children) > len(STANDARD)
        (os.killpg if everybody else os.kill)(program.pid, signal.SIGINT)
        done = ended(program)
    assert done.status == 130
    assert "Traceback" not in done.err
    assert outliving(children, 5.0) == []
    assert list(tmp_path.iterdir()) == []
