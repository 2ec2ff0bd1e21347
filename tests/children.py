"""Child processes that do what a test tells them, one call at a time, until they are told to end or are killed.

``with Child() as child: child.call(open_consumer, "frames"); child.call(take, 3)``. What can be told stands below: each
is a function of the child's ``Ends``, and what it returns or raises comes back to the test. ``begin`` and ``result`` are
the two halves of ``call``, for what takes its time.

The children come from a fork server that has imported torch and computed nothing: each is there in some ten
milliseconds, and no thread of torch's or ZeroMQ's was forked.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import containers
import raw_ends
import torch
import zmq
import zoo

import tensorpipe_ipc as tp
from tensorpipe_ipc.cli.doctor import attached
from tensorpipe_ipc.endpoints import conversation
from tensorpipe_ipc.process import Identity, identity

BAD_TIMEOUTS = [  # and the errors that they raise
    (-1, ValueError),
    (-0.001, ValueError),
    (float("nan"), ValueError),
    ("1", TypeError),
    ([], TypeError),
    (True, TypeError),
    (False, TypeError),
]
PATIENCE = 10.0  # seconds for what should take milliseconds, on a machine that does other things too
AT_LENGTH = 3 * PATIENCE  # seconds for what is work, and takes some
_context = multiprocessing.get_context("forkserver")


def start_fork_server() -> None:
    """Start the server that children are forked from; what it then is, it stays."""
    _context.set_forkserver_preload(["children"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # Python 3.11's server does not look for this file otherwise
    try:
        forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before


class Ends:
    """The open ends of a child: its producer, its consumer, and the messages that it took and holds."""

    def __init__(self) -> None:
        self.producer: Any = None
        self.consumer: Any = None
        self.held: list[Any] = []

    def close(self) -> None:
        """Close what is open."""
        for end in (self.producer, self.consumer):
            if end is not None:
                end.close()


class Child:
    """A process that does what it is told. At the end of a ``with`` it closes its ends and is gone; killed if need be."""

    def __init__(self) -> None:
        self._line, theirs = _context.Pipe()
        self._process = _context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self.pid = self._process.pid or 0

    def begin(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        """Have it begin a call."""
        self._line.send((function, arguments, options))

    def has_result(self) -> bool:
        """Return whether ``result`` would return at once."""
        return self._line.poll()

    def result(self) -> Any:
        """Return the result of the call that was begun, or raise its exception."""
        assert self._line.poll(PATIENCE), "the child does not answer"
        done, value = self._line.recv()
        if not done:
            raise value
        return value

    def call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Have it call a function, and wait."""
        self.begin(function, *arguments, **options)
        return self.result()

    def signal(self, number: int) -> None:
        """Send it a signal; SIGSTOP, and wait until all of its threads have stopped, libzmq's among them."""
        os.kill(self.pid, number)
        if number == signal.SIGSTOP:
            wait_until(lambda: set(map(_state, Path(f"/proc/{self.pid}/task").iterdir())) == {"T"})

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._process.kill()
        self._process.join(PATIENCE)
        assert self._process.exitcode == -signal.SIGKILL

    def wait_until_blocked(self) -> None:
        """Wait until its main thread waits in a system call for something other than the next call."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if any(
                call in _where(self.pid) for call in ("poll", "nanosleep")
            ):  # or sleeps until its next try to connect
                return
            time.sleep(0.001)
        raise AssertionError(f"pid {self.pid} does not wait: {_where(self.pid)!r}")

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._line.send(None)
        self._process.join(PATIENCE)  # more than the default linger: how long an end may take to close
        gone = self._process.exitcode is not None
        if not gone:
            self._process.kill()
            self._process.join(PATIENCE)
        code = self._process.exitcode
        self._line.close()
        self._process.close()
        if kind is None:
            assert gone, "the child did not end by itself"
            assert code in (0, -signal.SIGKILL), f"the child ended with {code}"


def consumer_of(child: Child, endpoint: str, *, bind: bool) -> tp.Consumer:
    """Open a consumer here, and the child's producer for it. One of them has the endpoint."""
    if not bind:
        return tp.Consumer(child.call(open_producer, endpoint, bind=True), bind=False)
    consumer = tp.Consumer(endpoint)
    child.call(open_producer, consumer.endpoint)
    return consumer


def _where(pid: int) -> str:
    """The kernel function that a process sleeps in, "0" if it runs."""
    with open(f"/proc/{pid}/wchan", encoding="ascii") as file:
        return file.read()


def _serve(line: Any) -> None:
    torch.set_num_threads(1)
    ends = Ends()
    try:
        for function, arguments, options in iter(line.recv, None):
            try:
                answer = True, function(ends, *arguments, **options)
            except BaseException as error:  # KeyboardInterrupt too: the test looks at it
                answer = False, error
            line.send(answer)
    except EOFError:  # the test is gone
        pass
    finally:
        ends.held.clear()
        ends.close()


# -- what a child can be told


def open_producer(ends: Ends, endpoint: str, **options: Any) -> str:
    """Open the child's producer. Returns its endpoint in full."""
    ends.producer = tp.Producer(endpoint, **options)
    return str(ends.producer.endpoint)


def open_consumer(ends: Ends, endpoint: str, **options: Any) -> str:
    """Open the child's consumer. Returns its endpoint in full."""
    ends.consumer = tp.Consumer(endpoint, **options)
    return str(ends.consumer.endpoint)


def put(ends: Ends, *trees: Any, timeout: float | None = PATIENCE) -> None:
    """Put each of the trees."""
    for tree in trees:
        ends.producer.put(tree, timeout)


def put_numbers(ends: Ends, start: int, stop: int, name: str = "") -> None:
    """Put (name, number) for each number."""
    for number in range(start, stop):
        ends.producer.put((name, number), PATIENCE)


def put_zoo(ends: Ends, serializer: str) -> list[str]:
    """Put every animal. Returns the names of those that the serializer refuses."""
    refused = []
    for name in zoo.ZOO:
        try:
            ends.producer.put(zoo.make(name), PATIENCE)
        except tp.UnsupportedLeaf as error:
            assert "use serializer='raw'" in str(error), error
            refused.append(name)
    return refused


def put_and_overwrite(ends: Ends, shape: tuple[int, ...], count: int, timeout: float | None) -> None:
    """Put a tensor of 0, 1, 2, ..., always the same one, and write -1 into it as soon as put returned."""
    tensor = torch.empty(shape)
    for number in range(count):
        tensor.fill_(number)
        ends.producer.put(tensor, timeout)
        tensor.fill_(-1)


def await_consumers(ends: Ends, count: int) -> None:
    """Wait until so many consumers are attached to the child's producer."""
    ends.producer.wait_for(count, PATIENCE)


def flush(ends: Ends, timeout: float | None = PATIENCE) -> None:
    """Wait until all is taken."""
    ends.producer.flush(timeout)


def take(ends: Ends, count: int = 1, timeout: float | None = PATIENCE) -> list[Any]:
    """Take messages, which should be plain Python values."""
    return [ends.consumer.get(timeout) for _ in range(count)]


def take_numbers_until(ends: Ends, last: int) -> list[int]:
    """Take (name, number) until that number, whatever ends meanwhile. Returns the numbers before it."""
    got: list[int] = []
    while True:
        try:
            number = ends.consumer.get(PATIENCE)[1]
        except (tp.PeerLost, tp.EndOfStream):
            continue
        if number == last:
            return got
        got.append(number)


def put_from_many(ends: Ends, endpoint: str, count: int, messages: int, name: str) -> None:
    """Put (name, number) from many producers, in turns, and close them."""
    with contextlib.ExitStack() as stack:
        producers = [stack.enter_context(tp.Producer(endpoint)) for _ in range(count)]
        for number in range(messages):
            for end, producer in enumerate(producers):
                producer.put((f"{name}-{end}", number), 2 * PATIENCE)


def take_by_many(ends: Ends, endpoint: str, count: int) -> list[list[Any]]:
    """Take by many consumers until each one's stream has ended. Returns what each took."""
    with contextlib.ExitStack() as stack:
        consumers = [stack.enter_context(tp.Consumer(endpoint, bind=False)) for _ in range(count)]
        got: list[list[Any]] = [[] for _ in consumers]
        left = set(range(count))
        while left:
            for end in list(left):
                try:
                    got[end].append(consumers[end].get(0.002))
                except tp.Empty:
                    continue
                except tp.EndOfStream:
                    left.discard(end)
        return got


def take_all(ends: Ends) -> list[Any]:
    """Take messages until every producer said goodbye."""
    return list(ends.consumer)


def check_all(ends: Ends) -> list[float]:
    """Take tensors until every producer said goodbye. Returns the one value that each is full of, or nan."""
    return list(map(_only_value, ends.consumer))


def take_and_check(ends: Ends, shape: tuple[int, ...], count: int) -> list[float]:
    """Take tensors. Returns the one value that each is full of, or nan."""
    return [_only_value(ends.consumer.get(PATIENCE)) for _ in range(count)]


def _only_value(tensor: torch.Tensor) -> float:
    first = tensor.flatten()[0]
    return float(first) if bool((tensor == first).all()) else float("nan")


def set_environment(ends: Ends, name: str, value: str) -> None:
    """Set a variable of the child's environment."""
    os.environ[name] = value


def seed_c(ends: Ends, seed: int) -> int:
    """Seed C's own random numbers, and return a sample of what comes."""
    library = ctypes.CDLL(None)
    library.srand(seed)
    first = int(library.rand())
    library.srand(seed)
    return first


def own_identity(ends: Ends) -> Identity:
    """Return the child's identity."""
    return identity()


def put_from_there(ends: Ends, way: str, endpoint: str, **options: Any) -> str:
    """Put 0 to 9 from a process in other circumstances (``containers``), if need be. Returns how they went, or the error."""

    def put() -> str:
        with tp.Producer(endpoint, **options) as producer:
            for number in range(10):
                producer.put(number, PATIENCE)
            producer.flush(PATIENCE)
            return producer.statistics().transport

    return said_there(way, put)


def take_there(ends: Ends, way: str, endpoint: str) -> str:
    """The other side of it, which binds. Returns how they came, and what the doctor says of who put them."""

    def take() -> str:
        with tp.Consumer(endpoint) as consumer:
            assert [consumer.get(PATIENCE) for _ in range(10)] == list(range(10))
            (found,) = [each for each in attached.findings(endpoint) if each.what == "  producer"]
            return f"{consumer.statistics().transport}\n{found.text}"

    return said_there(way, take)


def both_there(ends: Ends, way: str, endpoint: str, maxsize: int) -> str:
    """Both sides in one process there. Returns how it went at each, and what the doctor says of it."""

    def exchange() -> str:
        with tp.Consumer(endpoint, maxsize=maxsize) as consumer, tp.Producer(endpoint, maxsize=maxsize) as producer:
            putting = in_thread(lambda: producer.put("arrives", PATIENCE))
            assert consumer.get(PATIENCE) == "arrives"
            putting()
            (found,) = [each for each in attached.findings(endpoint) if each.what == "  producer"]
            return "\n".join((producer.statistics().transport, consumer.statistics().transport, found.text))

    return said_there(way, exchange)


def said_there(way: str, action: Callable[[], str]) -> str:
    """Do something in other circumstances, if need be. Returns what it returns, or the error."""
    reader, writer = os.pipe()

    def run() -> None:
        try:
            said = action()
        except tp.TensorPipeError as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writer, said.encode())

    status = containers.run_there(way, run) if way in (*containers.WAYS, *containers.OF_ONE_USER) else run()
    os.close(writer)
    with open(reader, "rb") as file:
        said = file.read().decode()
    assert not status, said
    return said


def producer_statistics(ends: Ends) -> Any:
    """A snapshot."""
    return ends.producer.statistics()


def consumer_statistics(ends: Ends) -> Any:
    """A snapshot."""
    return ends.consumer.statistics()


def drop_producer(ends: Ends) -> None:
    """Let go of the producer without closing it."""
    ends.producer = None
    gc.collect()


def close(ends: Ends) -> None:
    """Close what is open."""
    ends.close()


def interrupted(ends: Ends, function: Callable[..., Any], *arguments: Any) -> float:
    """Make a call that a Ctrl-C ends. Returns how many seconds after the last signal that was."""
    signalled = [0.0]

    def interrupt(number: int, frame: Any) -> None:
        signalled[0] = time.monotonic()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        function(ends, *arguments)
    except KeyboardInterrupt:
        return time.monotonic() - signalled[0]
    finally:
        signal.signal(signal.SIGINT, before)
    raise AssertionError("nobody interrupted")


@contextlib.contextmanager
def ticking(seconds: float, handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Have a signal's handler called every so many seconds of the process's time."""
    signal.signal(signal.SIGVTALRM, handler)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds)
    try:
        yield
    finally:
        # This one stays: the last signal may come late, and by default it ends the process.
        signal.signal(signal.SIGVTALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _state(thread: Path) -> str:
    return (thread / "stat").read_text().rpartition(") ")[2][0]


def asleep(pid: int) -> bool:
    """Return whether a process sleeps, and so waits for what it is to be told."""
    return _state(Path(f"/proc/{pid}")) == "S"


def wait_until(condition: Callable[[], Any], bound: float = PATIENCE) -> None:
    """Ask until something holds, as asking an end for its statistics has it look at what has come in."""
    deadline = time.monotonic() + bound
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.0005)  # the one who makes it so may need this processor


def in_thread(function: Callable[[], Any]) -> Callable[..., Any]:
    """Begin a call in a thread. Returns what waits for its result."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append((True, function()))
        except BaseException as error:  # handed to the test
            results.append((False, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result(bound: float = PATIENCE) -> Any:
        thread.join(bound)
        assert results, "the thread does not end"
        done, value = results[0]
        if not done:
            raise value
        return value

    return result


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """Take all descriptors that this process may have, but for some."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 10, limits[1]))
    taken: list[int] = []
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for each in taken[:count]:
            os.close(each)
        for each in taken[count:]:
            stack.callback(os.close, each)
        yield


def take_all_that_is_there(consumer: tp.Consumer) -> list[Any]:
    """Take messages until there is none."""
    found = []
    with contextlib.suppress(tp.Empty):
        while True:
            found.append(consumer.get_nowait())
    return found


def move_out_of_sight(ends: Ends, folder: str) -> None:
    """Have another runtime folder from now on: ends of this process are not seen by others, nor these by them."""
    os.environ["XDG_RUNTIME_DIR"] = folder


def put_until_nobody_is_there(ends: Ends) -> str:
    """Put until there is no consumer any more, and return what is said of that."""
    while True:
        try:
            ends.producer.put(0, 0.1)
        except tp.Full as full:
            if "is attached" in str(full):
                return str(full)


def put_and_leave(endpoint: str, *trees: Any, shared_memory: str = "auto") -> None:
    """Put trees by a producer that is open meanwhile only."""
    with tp.Producer(endpoint, shared_memory=shared_memory) as producer:
        for tree in trees:
            producer.put(tree, PATIENCE)


def fail_after(ends: Ends, endpoint: str, count: int, text: str) -> None:
    """Put some numbers, and leave the producer by an exception."""
    with contextlib.suppress(ValueError), tp.Producer(endpoint) as producer:
        for number in range(count):
            producer.put(number, PATIENCE)
        raise ValueError(text)


def leave_by(ends: Ends, text: str) -> None:
    """Leave the child's producer by an exception. It tries to get its binder for as long as a busy machine may need."""
    conversation._CONNECTS = PATIENCE
    with contextlib.suppress(ValueError), ends.producer:
        raise ValueError(text)


def flood(ends: Ends, endpoint: str, role: str) -> None:
    """Say garbage and greetings that are refused to an endpoint, by many connections, until killed."""
    garbage = [raw_ends.hello(role), b"garbage"]
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(raw_ends.RawEnd(endpoint)) for _ in range(4)]
        while True:
            for raw in crowd:
                for frame in garbage:
                    with contextlib.suppress(zmq.Again):
                        raw.say_at_once(frame)


def spin(ends: Ends) -> None:
    """Compute as fast as it can, until killed."""
    while True:
        pass


def put_without_end(ends: Ends, size: int) -> None:
    """Put a tensor of so many zeros again and again, until killed."""
    tree = torch.zeros(size)
    while True:
        with contextlib.suppress(tp.Full):
            ends.producer.put(tree, 0.1)


def take_and_drop(ends: Ends, count: float) -> None:
    """Take so many messages; math.inf: until killed."""
    while count > 0:
        with contextlib.suppress(tp.Empty):
            ends.consumer.get(0.1)
            count -= 1


def put_many_large(ends: Ends, nbytes: int, count: int) -> None:
    """Put messages of so many bytes each."""
    for _ in range(count):
        ends.producer.put(torch.ones(nbytes, dtype=torch.uint8), timeout=PATIENCE)


def release(ends: Ends) -> None:
    """Let go of what the child holds."""
    ends.held.clear()


def wait_in_vain(ends: Ends, seconds: float) -> None:
    """Wait for a message that does not come."""
    with contextlib.suppress(tp.Empty):
        ends.consumer.get(seconds)


def put_until_full(ends: Ends, seconds: float) -> None:
    """Put numbers until one finds no room for so long."""
    with contextlib.suppress(tp.Full):
        while True:
            ends.producer.put(1, seconds)


def trim(ends: Ends) -> int:
    """Give back the memory of all the child's ends that nobody needs. Returns its bytes."""
    return sum(end.trim() for end in (ends.producer, ends.consumer) if end is not None)


def be_stage(ends: Ends, upstream: str, downstream: str) -> str:
    """Pass on what comes, plus 1, until it ends. Returns how it ended."""
    try:
        with tp.Producer(downstream) as producer:
            for number in ends.consumer:
                producer.put(number + 1, PATIENCE)
    except tp.TensorPipeError as error:
        return f"{type(error).__name__}: {error}"
    return "well"


def put_numbers_and_close(ends: Ends, name: str, count: int) -> None:
    """Put (name, number) for each number, and say goodbye."""
    put_numbers(ends, 0, count, name)
    ends.producer.close()


def batch(step: int) -> dict[str, Any]:
    """Return a batch such as a loader sends to a training loop."""
    return {"image": zoo.bits(torch.uint8, 16, 3, 64, 64, seed=step), "label": torch.arange(16), "step": step}


def put_batches(ends: Ends, count: int) -> None:
    """Put batches of the steps."""
    for step in range(count):
        ends.producer.put(batch(step))


def fill_loans(ends: Ends, shape: tuple[int, ...], count: int) -> int:
    """Lend tensors and fill them with 0, 1, 2, .... Returns how many were still there when they had been sent."""
    left = 0
    for number in range(count):
        with ends.producer.loan(shape, timeout=PATIENCE) as tensor:
            tensor.fill_(number)
        left += tensor.numel() > 0
    return left


def hold(ends: Ends, count: int) -> None:
    """Take messages and keep them."""
    ends.held += [ends.consumer.get(PATIENCE) for _ in range(count)]


def abandon(ends: Ends) -> None:
    """Close without waiting for messages to be taken, and without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ends.close()


def put_for_ever(ends: Ends, tree: Any) -> None:
    """Put, however long it takes."""
    ends.producer.put(tree)


def put_numbers_while_ticking(ends: Ends, count: int) -> int:
    """Put (name, number) for each number, while signals interrupt. Returns how many did."""
    ticks: list[int] = []
    with ticking(0.001, lambda number, frame: ticks.append(number)):
        put_numbers(ends, 0, count)
    return len(ticks)


def fork_that_waits(ends: Ends) -> int:
    """Fork a process that holds what this one has open, and does nothing. Returns its pid."""
    pid = os.fork()
    if not pid:
        while True:
            signal.pause()
    return pid


class OnlyThere(NamedTuple):
    """A type that the test's own process does not register."""

    value: int


def put_unknown_type(ends: Ends) -> None:
    """Put a type that only this process registers, and then something else."""
    tp.register_type(OnlyThere)
    ends.producer.put({"sample": OnlyThere(1)}, PATIENCE)
    ends.producer.put("next", PATIENCE)
