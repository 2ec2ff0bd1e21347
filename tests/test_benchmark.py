"""benchmark: its arithmetic, that what is lost or damaged is caught, and that nothing of it is left, however it ends."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing
from guard import runtime_folder
from programs import ended, left_of, started

import tensorpipe_ipc as tp
from tensorpipe_ipc import benchmark, cli
from tensorpipe_ipc.benchmark import measuring
from tensorpipe_ipc.benchmark.crew import Crew, Line, Program, Station, Tokens
from tensorpipe_ipc.benchmark.measuring import plan_of
from tensorpipe_ipc.benchmark.messages import cases_of, digest
from tensorpipe_ipc.benchmark.one_way import one_ways
from tensorpipe_ipc.benchmark.pipelines import End
from tensorpipe_ipc.benchmark.programs import ONE_WAY, Arrival, Streamed, shares
from tensorpipe_ipc.benchmark.stream import checked
from tensorpipe_ipc.benchmark.summary import interval, is_settled, percentiles
from tensorpipe_ipc.cli import benchmark as commands

OPTIONS: Any = {
    name: parameter.default
    for name, parameter in inspect.signature(benchmark.latency).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
}
SHORT: Any = {"seconds": 0.05, "method": "fork"}  # three rounds of each


# -- arithmetic


def test_percentiles_are_numpys() -> None:
    """Percentiles interpolate as NumPy's do; those beyond which fewer than two times lie are not told."""
    times = np.random.default_rng(1).lognormal(10, 1, 3000).astype(int).tolist()
    found = percentiles(times)
    wanted = np.percentile(np.array(times) / 1000, [50, 90, 99, 99.9, 100])
    assert np.allclose([found.p50_us, found.p90_us, found.p99_us, found.p999_us, found.max_us], wanted)
    assert found.samples == 3000
    assert percentiles([1000, 2000, 3000, 10_000]) == benchmark.Percentiles(2.5, None, None, None, 10.0, 4)
    few = percentiles(times[:199])
    assert few.p90_us is not None
    assert few.p99_us is None
    assert percentiles(times[:200]).p99_us is not None


def test_the_interval_holds_the_median() -> None:
    """Of 95 % of samples, or more, the interval holds the median of what they are drawn from; it settles where it is narrow."""
    draws = np.random.default_rng(2).exponential(1.0, (500, 21))
    held = sum(low <= np.log(2) <= high for low, high in map(interval, draws.tolist()))
    assert held >= 475
    assert interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert not is_settled([1.0] * 5)
    assert is_settled([1.0] * 6)
    assert is_settled([0.96, 1, 1, 1, 1, 1.05])
    assert not is_settled([0.9, 1, 1, 1, 1, 1.05])


def test_one_way_is_the_difference_of_the_clocks() -> None:
    """The benchmark joins the messages of several producers and consumers by time. A difference is an error."""
    starts = [[Arrival(100, 1), Arrival(500, 3)], [Arrival(300, 2)]]
    ends = [[Arrival(310, 2)], [Arrival(107, 1), Arrival(501, 3)]]
    assert one_ways(starts, ends, "it") == [7, 10, 1]
    for wrong, said in (
        ([[Arrival(310, 2)], [Arrival(107, 1), Arrival(501, 4)]], "it: message 3 of 3 is not the one that was put"),
        ([[Arrival(310, 2)], [Arrival(107, 1), Arrival(499, 3)]], "it: message 3 of 3 is not the one that was put"),
        ([[Arrival(310, 2)], [Arrival(107, 1)]], "it: 3 messages were put, and 2 came"),
    ):
        with pytest.raises(tp.MeasurementFailed, match=said):
            one_ways(starts, wrong, "it")


def test_a_streams_messages_are_counted_by_content() -> None:
    """No message may come more often than it was put, nor another one, nor too few."""
    put = [Streamed(5, 0, 0, [1, 2]), Streamed(1, 0, 0, [1])]  # 1 four times, 2 twice
    checked(put, [Streamed(6, 0, 0, [1, 1, 1, 1, 2, 2])], True, "it")
    checked(put, [Streamed(2, 0, 0, [2]), Streamed(4, 0, 0, [2])], False, "it")
    for got, said in (
        ([Streamed(6, 0, 0, [1, 1, 1, 2, 2, 2])], "damaged, or twice"),
        ([Streamed(6, 0, 0, [3])], "damaged, or twice"),
        ([Streamed(5, 0, 0, [1])], "6 messages were put, and 5 came"),
    ):
        with pytest.raises(tp.MeasurementFailed, match=said):
            checked(put, got, True, "it")


def test_shares_add_up() -> None:
    """Messages are dealt out evenly, and all of them."""
    assert [shares(count, 3) for count in (3, 7, 8)] == [[1, 1, 1], [3, 2, 2], [3, 3, 2]]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.float8_e4m3fn, torch.uint8]
)
def test_messages_have_their_size_and_differ(dtype: torch.dtype) -> None:
    """A message has as many bytes as its case says, and another content than the last; a digest sees every bit and shape."""
    for size, tree, nbytes in (
        ("4kB", "tensor", 4000),
        ("4kB", "dict:5", 4000),
        ("5x3x4", "dict:2", 120 * dtype.itemsize),
    ):
        (case,) = cases_of([size], dtype, tree)
        first, second = case.make(), case.make()
        assert case.nbytes == nbytes == benchmark.messages.nbytes_of(first)
        assert digest(first) != digest(second)
        leaf = first if tree == "tensor" else first["leaf 1"]
        before = digest(first)
        leaf.view(-1).view(torch.uint8)[-1] ^= 1
        assert digest(first) != before
    flat = torch.zeros(4)
    assert (
        len({digest(each) for each in (flat, flat.view(2, 2), flat.int(), [flat], {"a": flat}, flat.numpy(), 0.0)}) == 7
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"sizes": ["3B"]}, "size 3B: 3 bytes are no whole number of items"),
        ({"sizes": ["400B"], "tree": "dict:3"}, "give a multiple of 12"),
        ({"sizes": ["4 apples"]}, "size '4 apples': give bytes, as 400B"),
        ({"sizes": ["0x3"]}, "has no items"),
        ({"sizes": []}, "give at least one"),
        (
            {"sizes": ["400B", "900000GB"], "producers": 2},
            "size 900000GB: to measure it takes about 16 times as much memory",
        ),
        ({"tree": "list:3"}, "tree='list:3': give 'tensor', or 'dict:N'"),
        ({"sizes": [4], "make": dict}, "sizes and make"),
        ({"producers": 0}, "producers=0"),
        ({"method": "spoon"}, "'spoon'"),
        ({"seconds": -1}, "seconds=-1"),
        ({"pipeline": benchmark.OverQueue(spin=1)}, "spin must be"),
        ({"pipeline": benchmark.OverQueue(copy="maybe")}, "copy"),  # type: ignore[arg-type]
        ({"pipeline": benchmark.OverQueue(device="cuda:63")}, "torch has no such GPU here"),
        ({"pipeline": benchmark.OverEndpoint("inproc")}, "inproc is for threads"),  # type: ignore[arg-type]
        ({"pipeline": benchmark.OverEndpoint(), "producers": 2, "consumers": 2}, "take a queue for many to many"),
        ({"pipeline": benchmark.Ends(print, input), "consumers": 2}, "a put and a get of your own"),
        ({"pipeline": benchmark.Ends(print, input), "round_trip": True}, r"give Ends a back=Ends\("),
        ({"pipeline": benchmark.OverQueue(loan=True), "round_trip": True}, "round_trip with loan=True"),
        ({"producers": 2, "round_trip": True}, "round_trip with 2 producers and 1 consumers"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], said: str) -> None:
    """An argument out of range, or in conflict with another, raises ValueError before anything is started."""
    with pytest.raises(ValueError, match=said):
        benchmark.latency(**arguments)


# -- measuring


def test_default_sizes_are_those_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without sizes, 100 MB are left out where memory is short."""
    names = [[case.name for case in plan_of(None, None, **OPTIONS).cases]]
    monkeypatch.setattr(measuring, "headroom", lambda: 1 << 30)
    names.append([case.name for case in plan_of(None, None, **OPTIONS).cases])
    assert names == [["400B", "4MB", "100MB"], ["400B", "4MB"]]


def _batch() -> dict[str, Any]:
    return {"x": torch.rand(3, 5), "y": [np.arange(4), 1, "z"], "n": None}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pipeline", "producers", "consumers"),
    [
        (benchmark.OverQueue(copy=False), 2, 2),
        (benchmark.OverQueue(loan=True, spin=1e-4), 2, 1),
        (benchmark.OverEndpoint(), 1, 2),
        (benchmark.OverEndpoint("tcp", shared_memory="off", serializer="numpy"), 2, 1),
        (benchmark.OverEndpoint(loan=True, copy=True), 1, 1),
    ],
    ids=str,
)
def test_every_pipeline_is_measured_and_checked(pipeline: Any, producers: int, consumers: int) -> None:
    """Both figures come of every pipeline, one to one and in fans, and are what they say of each other."""
    who = {"producers": producers, "consumers": consumers}
    report = benchmark.latency(pipeline, ["400B", "2x200x250"], tree="dict:2", **who, **SHORT)
    assert benchmark.LatencyReport.from_json(report.to_json()) == report
    assert [(result.name, result.nbytes) for result in report.results] == [("400B", 400), ("2x200x250", 800_000)]
    for result in report.results:
        assert 0 < result.p50_low_us <= result.p50_high_us <= result.one_way.max_us
        assert 0 < result.floors.wake_up.p50_us
        assert 0 < result.floors.memcpy.p50_us
        assert result.rounds >= 3
        assert result.times_floor > 0
        assert result.one_way.samples >= producers * result.rounds
    flow = benchmark.throughput(pipeline, ["400B"], **who, **SHORT)
    assert benchmark.ThroughputReport.from_json(flow.to_json()) == flow
    (found,) = flow.results
    assert found.low_per_second <= found.messages_per_second <= found.high_per_second
    assert found.gib_per_second == pytest.approx(found.messages_per_second * 400 / 2**30)
    assert found.producer_cpu_s_per_million > 0
    assert found.consumer_cpu_s_per_million > 0
    with pytest.raises(ValueError, match="no LatencyReport"):
        benchmark.LatencyReport.from_json(flow.to_json())
    for text in (str(report), str(flow)):
        assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    "pipeline", [benchmark.OverQueue(), benchmark.OverEndpoint("tcp", shared_memory="off")], ids=str
)
def test_a_round_trip_is_told_beside_one_way(pipeline: Any) -> None:
    """Both come of the same messages: there and back takes longer than there, and each says which it is."""
    report = benchmark.latency(pipeline, ["400B", "40kB"], tree="dict:2", round_trip=True, **SHORT)
    assert benchmark.LatencyReport.from_json(report.to_json()) == report
    for result in report.results:
        assert result.round_trip is not None
        assert result.round_trip.samples == result.one_way.samples >= 3
        assert result.one_way.p50_us < result.round_trip.p50_us
        assert result.round_trip_times_floor is not None
    assert str(report).count("\nround trip ") == 2
    assert max(map(len, str(report).splitlines())) <= 80


@pytest.mark.slow
def test_a_message_and_a_pipeline_of_ones_own() -> None:
    """A maker of trees, and a put and a get of multiprocessing's, are measured as ours are; progress is told."""
    queue = torch.multiprocessing.get_context("fork").SimpleQueue()
    told: list[tuple[float, str]] = []
    report = benchmark.latency(
        benchmark.Ends(queue.put, queue.get), make=_batch, tell=lambda part, what: told.append((part, what)), **SHORT
    )
    (result,) = report.results
    assert (result.name, result.nbytes) == ("_batch", 60 + 32)
    assert told[0] == (0.0, "starting")
    assert {what for _, what in told[1:]} == {"_batch"}
    assert all(0 <= part <= 1 for part, _ in told)
    (flow,) = benchmark.throughput(benchmark.Ends(queue.put, queue.get), make=_batch, **SHORT).results
    assert flow.messages_per_second > 0
    back = torch.multiprocessing.get_context("fork").SimpleQueue()
    both = benchmark.Ends(queue.put, queue.get, back=benchmark.Ends(back.put, back.get))
    assert benchmark.latency(both, make=_batch, round_trip=True, **SHORT).results[0].round_trip is not None
    back.close()
    queue.close()


class _Faulty:
    """A pipe of multiprocessing's that damages, loses or repeats every fifth message, or whose receiver dies of it."""

    def __init__(self, fault: str) -> None:
        self.taken, self.given = multiprocessing.get_context("fork").Pipe(duplex=False)
        self.fault, self.count = fault, 0

    def put(self, tree: Any) -> None:
        self.count += 1
        fault = self.fault if not self.count % 5 else ""
        if fault == "damages":
            tree = tree.clone()
            tree[-1] += 1
        for _ in range({"loses": 0, "repeats": 2}.get(fault, 1)):
            self.given.send((fault, tree.numpy()))

    def get(self) -> torch.Tensor:
        fault, array = self.taken.recv()
        if fault == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "fails":
            raise OSError("of its own")
        return torch.from_numpy(array)

    def close(self) -> None:
        self.taken.close()
        self.given.close()


@pytest.mark.parametrize(
    ("fault", "error", "said"),
    [
        ("damages", tp.MeasurementFailed, "damaged"),
        ("repeats", tp.MeasurementFailed, "damaged|were put|stands still"),
        ("loses", tp.MeasurementFailed, "after 1 s the (consumer|producer).* a message was lost on its way"),
        ("dies", tp.PeerLost, r"400 B, .*: the consumer \(pid \d+\) was killed by SIGKILL"),
        ("fails", tp.MeasurementFailed, "(?s)the consumer .* failed:.*OSError: of its own"),
    ],
)
@pytest.mark.parametrize("measure", [benchmark.latency, benchmark.throughput])
def test_a_pipeline_that_is_wrong_is_caught(measure: Any, fault: str, error: type[Exception], said: str) -> None:
    """A message that is lost, damaged or repeated, and a process that dies or fails, end the measurement with an error."""
    pipe = _Faulty(fault)
    with pytest.raises(error, match=said):
        measure(benchmark.Ends(pipe.put, pipe.get), [400], patience=1.0 if fault == "loses" else 25.0, **SHORT)
    pipe.close()


def test_a_producer_of_one_way_waits_until_the_last_was_taken() -> None:
    """Else a consumer that shares with others may hear that all is over while the last message is still to come."""
    fork = multiprocessing.get_context("fork")
    turn, wake, (control, ours) = Tokens(fork), Tokens(fork), fork.Pipe()
    station = Station(0, True, True, turn, wake)
    done: list[str] = []
    station.end = End(lambda _: done.append("put"), input, finish=lambda: done.append("finish"))
    station.make, station._control = _batch, control
    ours.send(None)
    turn.give()
    turn.give()
    assert len(ONE_WAY.produce(station, [2])) == 2  # type: ignore[misc]
    assert done == ["put", "put", "finish"]
    for each in (turn, wake, control, ours):
        each.close()


def _takes_it(station: Station) -> None:
    station.arrive()
    station.turn.take()


def test_a_turn_that_is_missing_is_told() -> None:
    """A program that takes a turn and passes none on does not leave the caller waiting."""
    fork = tp.get_context("fork")
    line = Line(benchmark.Ends(print, input).made(fork, 4, 1, Path()), None, _batch)
    with Crew(fork, [line], producers=1, consumers=1, pin=False, patience=20) as crew:
        with pytest.raises(tp.MeasurementFailed, match="it: a turn is missing"):
            crew.run(Program(_takes_it, Station.arrive, takes_turns=True), 0, what="it")


def test_what_a_process_meets_is_raised_here() -> None:
    """An error of ours in a producer keeps its type: a leaf that the serializer does not take."""
    with pytest.raises(tp.UnsupportedLeaf, match="bfloat16"):
        benchmark.latency(benchmark.OverQueue(serializer="numpy"), [400], dtype=torch.bfloat16, **SHORT)


@pytest.mark.kills
@pytest.mark.limit(240)
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize(
    "pipeline", [benchmark.OverQueue(), benchmark.OverEndpoint(), benchmark.OverEndpoint("tcp")], ids=str
)
def test_every_start_method(method: str, pipeline: Any) -> None:
    """Spawned and fork-server processes measure as forked ones do, there and back."""
    report = benchmark.latency(pipeline, [400], seconds=0.05, method=method, round_trip=True)
    assert report.setup.method == method
    assert report.results[0].one_way.samples >= 3


# -- the commands


def _interrupted(everybody: bool, *options: str, ends: int = 0) -> tuple[int, str, str, float]:
    """Ctrl-C once processes are there, and have so many ends: status, output, errors, and how long it took."""
    with started("-m", "tensorpipe_ipc", *options, "--sizes", "400B", "--seconds", "60") as program:
        children = Path(f"/proc/{program.pid}/task/{program.pid}/children")
        deadline = time.monotonic() + 50
        while len(children.read_text().split()) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        while len(list(runtime_folder().glob("*.end"))) < ends and time.monotonic() < deadline:
            time.sleep(0.01)
        begun = time.monotonic()
        (os.killpg if everybody else os.kill)(program.pid, signal.SIGINT)
        done = ended(program)
        took = time.monotonic() - begun
        assert left_of(program.pid) == []
    return done.status, done.out, done.err, took


@pytest.mark.slow
def test_ctrl_c_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends the command with status 130 and no word, and takes its processes, sockets, folder and ends' files with it."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    status, out, err, _ = _interrupted(True, "latency", "--transport", "ipc", ends=2)
    assert (status, out, err) == (130, "", "")
    assert list(runtime_folder().iterdir()) == []
    runtime_folder().rmdir()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.kills
@pytest.mark.limit(240)
@pytest.mark.parametrize("everybody", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        ("latency",),
        ("throughput", "--transport", "tcp"),
        ("throughput", "--method", "spawn"),
        ("latency", "--consumers", "2"),
    ],
    ids=" ".join,
)
def test_ctrl_c_leaves_nothing_in_any_case(
    options: tuple[str, ...], everybody: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it does to everybody, or to the parent alone."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert _interrupted(everybody, *options)[:3] == (130, "", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("command", ["latency", "throughput"])
def test_a_command_prints_and_writes(command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A run prints a table of at most 80 columns, and writes JSON that can be read back, and a picture."""
    json_file, picture = tmp_path / "b.json", tmp_path / "b.png"
    options = [
        "--sizes",
        "400B,40kB",
        "--seconds",
        "0.05",
        *(["--round-trip"] if command == "latency" else []),
        "--json",
        str(json_file),
        "--plot",
        str(picture),
    ]
    pid = os.fork()  # matplotlib keeps its fonts open
    if not pid:
        try:
            os._exit(cli.main([command, *options]))
        finally:
            os._exit(99)
    assert os.waitpid(pid, 0)[1] == 0
    out, err = capfd.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    names = [line.split("  ")[0] for line in lines[1:4]]
    assert names == (["400B", "round trip", "40kB"] if command == "latency" else ["400B", "40kB", names[2]])
    text = json_file.read_text()
    kind: Any = benchmark.LatencyReport if command == "latency" else benchmark.ThroughputReport
    report = kind.from_json(text)
    assert json.loads(text)["results"] == [dataclasses.asdict(result) for result in report.results]
    assert str(report) in out
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("options", "pipeline", "others"),
    [
        ([], benchmark.OverQueue(), {}),
        (["--spin", "0.0001", "--copy", "never"], benchmark.OverQueue(spin=1e-4, copy=False), {}),
        (["--loan", "--copy", "always"], benchmark.OverQueue(loan=True, copy=True), {}),
        (["--transport", "ipc", "--serializer", "numpy"], benchmark.OverEndpoint("ipc", serializer="numpy"), {}),
        (["--transport", "tcp", "--shared-memory", "off"], benchmark.OverEndpoint("tcp", shared_memory="off"), {}),
        (["--device", "cpu"], benchmark.OverQueue(device="cpu"), {"method": None}),
        (["--sizes", "400B,3x4", "--dtype", "bfloat16"], benchmark.OverQueue(), {"sizes": ["400B", "3x4"]}),
        (["--tree", "dict:3", "--no-pin", "--seconds", "1"], benchmark.OverQueue(), {"tree": "dict:3", "pin": False}),
        (["--producers", "3", "--method", "spawn"], benchmark.OverQueue(), {"producers": 3, "method": "spawn"}),
        (["--consumers", "2"], benchmark.OverQueue(), {"consumers": 2, "pin": True, "method": "fork"}),
    ],
)
def test_every_option_reaches_the_measurement(options: list[str], pipeline: Any, others: dict[str, Any]) -> None:
    """The benchmark measures what the options ask for. Each parameter of ``latency`` has one, but for functions."""
    parser = argparse.ArgumentParser()
    commands.add_arguments(parser)
    arguments = parser.parse_args(options)
    assert commands.pipeline_of(arguments) == pipeline
    found = commands.options_of(arguments)
    assert {name: found[name] for name in others} == others
    assert found["dtype"] == (torch.bfloat16 if "bfloat16" in options else torch.float32)
    assert OPTIONS.keys() - found.keys() == {"make", "patience", "tell", "round_trip"}


def test_what_is_not_pinned_is_measured_too() -> None:
    """Processes that are bound to no CPU, with a queue's device and a copy of what comes."""
    report = benchmark.latency(benchmark.OverQueue(device="cpu", copy=True), [400], pin=False, **SHORT)
    assert report.setup.pin is False
    assert "bound to no CPU" in str(report)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--sizes", "3B"], "size 3B"),
        (["--round-trip", "--consumers", "2"], "round_trip with 1 producers and 2 consumers"),
        (["--dtype", "float33"], "--dtype float33"),
        (["--shared-memory", "off"], "--shared-memory is for --transport ipc and tcp"),
        (["--transport", "tcp", "--spin", "0.001"], "--spin is for --transport queue"),
        (["--device", "cuda:63"], "torch has no such GPU here"),
        (["--serializer", "pickle"], "unknown serializer 'pickle'"),
        (["--json", "/nowhere/at/all.json"], "/nowhere/at/all.json: cannot be written"),
    ],
)
def test_options_that_cannot_be_are_one_line(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An option that is out of range, or goes not with another, is one line and status 1, before anything is started."""
    assert cli.main(["latency", *options]) == 1
    err = capsys.readouterr().err
    assert err.startswith("tensorpipe-ipc: ")
    assert said in err
    assert err.count("\n") == 1


def test_without_matplotlib_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plot without matplotlib: the line to type, before anything is measured."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["throughput", "--plot", "b.png"]) == 2
    assert "this needs matplotlib: pip install 'tensorpipe-ipc[plot]'" in capsys.readouterr().err
