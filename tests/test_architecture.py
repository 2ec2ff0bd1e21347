"""The house as a test: which floor each file stands on, who may import whom, and who may touch which library."""

from __future__ import annotations

import ast
import dis
import functools
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

import tensorpipe_ipc
from tensorpipe_ipc.endpoints import participant
from tests.inside import keep_pure

HOUSE = Path(tensorpipe_ipc.__file__).parent
FILES = sorted(path.relative_to(HOUSE).as_posix() for path in HOUSE.rglob("*.py"))

# What stands at the top of the package, file or folder, and its floor. A new one gets its floor here first.
FLOORS = {
    "borrowed": 0,
    "errors": 0,
    "forks": 0,
    "handlers": 0,
    "headroom": 0,
    "libc": 0,
    "limits": 0,
    "owned_fd": 0,
    "process": 0,
    "sections": 0,
    "security": 1,
    "wire": 1,
    "serializers": 2,
    "memory": 3,
    "zeromq": 3,
    "shared_queue": 4,
    "compiled": 5,
    "cuda": 5,
    "endpoints": 6,
    "queues": 6,
    "tracking": 6,
    "__init__": 7,
    "benchmark": 7,
    "multiprocessing": 7,
    "cli": 8,
    "__main__": 9,
}

# Each foreign library has one door, where its errors are translated. Files, or folders with a slash at the end.
DOORS = {
    "zmq": {
        f"zeromq/{file}.py"
        for file in ("zmq_sockets", "zmq_contexts", "frame_reader", "binder", "connector", "line", "curve")
    },
    "psutil": {"process.py", "tracking.py"},
    "mmap": {"libc.py", "memory/segment.py", "memory/apart.py", "shared_queue/token_pipe.py"},
    "rich": {"cli/"},
    "sklearn": set(),  # the demo alone, which is an example
    "PIL": set(),
    "matplotlib": {"tracking.py", "cli/"},
    "torch.cuda": {"cuda/staging.py", "cuda/device_blocks.py"},
}

# Whatever turns bytes into calls. Bytes from a socket never meet one. Queues are private to one family of processes.
PICKLES = {"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "copyreg", "joblib"}
PICKLE_DOORS = {"queues/pickling.py"}

# Where a message's way ends: at the bytes, or at the socket.
ENDS_OF_WAYS = (
    ("serializers/raw.py::encode",),
    ("serializers/raw.py::decode_in",),
    ("zeromq/zmq_sockets.py::lend",),
    ("zeromq/frame_reader.py::read",),
)


@functools.cache
def _tree(file: str) -> ast.Module:
    return ast.parse((HOUSE / file).read_text(encoding="utf-8"), file)


@functools.cache
def _imports(file: str) -> tuple[str, ...]:
    """Every module that a file imports, by its full dotted name, wherever in the file the import stands."""
    return tuple(_found(file))


def _found(file: str) -> Iterator[str]:
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}:{node.lineno}: imports are absolute here"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if _is_module(name) or node.module == "torch" else str(node.module)


def _is_module(name: str) -> bool:
    path = HOUSE.parent.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def _own_imports(file: str) -> set[str]:
    """The files of the house that a file imports."""
    found = set()
    for name in _imports(file):
        package, _, rest = name.partition(".")
        if package == HOUSE.name:
            path = rest.replace(".", "/")
            found.add(f"{path}.py" if (HOUSE / f"{path}.py").is_file() else f"{path}/__init__.py".lstrip("/"))
    return found


def _room(file: str) -> str:
    return file.split("/")[0].removesuffix(".py")


@pytest.mark.slow
def test_imports_point_down() -> None:
    """A file imports its own room and lower floors only; the rooms of one floor do not know each other."""
    for file in FILES:
        room = _room(file)
        assert room in FLOORS, f"{file} stands on no floor: give {room!r} one in FLOORS"
        for other in _own_imports(file):
            assert _room(other) == room or FLOORS[_room(other)] < FLOORS[room], (
                f"{file} (floor {FLOORS[room]}) imports {other} (floor {FLOORS[_room(other)]})"
            )


def test_has_no_cycles() -> None:
    """No file imports itself by way of others."""
    done: set[str] = set()

    def visit(file: str, way: tuple[str, ...]) -> None:
        assert file not in way, f"a cycle: {' -> '.join([*way[way.index(file) :], file])}"
        if file not in done:
            for other in sorted(_own_imports(file) - {file}):
                visit(other, (*way, file))
            done.add(file)

    for file in FILES:
        visit(file, ())


def test_each_library_has_one_door() -> None:
    """A foreign library is imported behind its door only, and what unpickles only where it is listed."""
    for file in FILES:
        for name in _imports(file):
            for library, doors in [*DOORS.items(), *((pickle, PICKLE_DOORS) for pickle in sorted(PICKLES))]:
                if name == library or name.startswith(f"{library}."):
                    assert any(file == door or (door.endswith("/") and file.startswith(door)) for door in doors), (
                        f"{file} imports {name}; its door is {sorted(doors) or 'nowhere'}"
                    )
            assert name.split(".")[0] not in ("bench", "examples", "tests"), f"{file} imports {name}"


def test_each_dangerous_call_has_one_door() -> None:
    """torch.load stands in its serializer only, and torch.cuda in the two files that copy GPU tensors."""
    for file in FILES:
        for node in ast.walk(_tree(file)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
                if node.attr == "load":
                    assert file == "serializers/torch_save.py", f"{file}:{node.lineno} calls torch.load"
                if node.attr == "cuda":
                    assert file in DOORS["torch.cuda"], f"{file}:{node.lineno} uses torch.cuda"


_FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint"),
    *("randn", "randperm", "scalar_tensor", "tensor", "zeros"),
}


def test_each_tensor_is_made_on_a_device_that_is_named() -> None:
    """Users set a default device, by torch.set_default_device or ``with torch.device``: it is theirs, and not the package's."""
    silent = [
        f"{file}:{call.lineno}"
        for file in FILES
        for call in ast.walk(_tree(file))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and (call.func.value.id, call.func.attr in _FACTORIES) == ("torch", True)
        and not any(keyword.arg == "device" for keyword in call.keywords)
    ]
    assert not silent


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="others look where the jump itself stands")
def test_what_a_signals_handler_raises_in_a_jump_back_meets_the_except_around_it() -> None:
    """CPython 3.11 looks for that ``except`` where the instruction before the jump's target stands."""
    stray = []
    for file in FILES:
        for code in _codes(compile((HOUSE / file).read_text(), file, "exec")):
            instructions: Any = dis.Bytecode(code)
            handlers = {
                at: each.target for each in instructions.exception_entries for at in range(each.start, each.end)
            }
            stray += [
                f"{file}:{each.positions.lineno} {code.co_name}"
                for each in instructions
                if "JUMP_BACKWARD" in each.opname and "NO_INTERRUPT" not in each.opname
                if handlers.get(each.offset) != handlers.get(each.argval - 2)
            ]
    assert not stray


def _public(body: list[ast.stmt]) -> list[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in body if isinstance(node, kinds) and not node.name.startswith("_")]


def test_public_names_are_documented() -> None:
    """Every file, public class, public function and public method says what it is for."""
    for file in FILES:
        tree = _tree(file)
        assert ast.get_docstring(tree) or not tree.body, f"{file} has no docstring"
        for node in _public(tree.body):
            assert ast.get_docstring(node), f"{file}:{node.lineno}: {node.name} has no docstring"
            if isinstance(node, ast.ClassDef):
                for method in _public(node.body):
                    accessor = any(isinstance(mark, ast.Attribute) for mark in method.decorator_list)  # @name.setter
                    assert ast.get_docstring(method) or accessor, f"{file}:{method.lineno}: {node.name}.{method.name}"


def test_all_names_what_is_public() -> None:
    """Each name in ``__all__`` is there, once, and no public class or function of the file is missing."""
    for file in FILES:
        tree = _tree(file)
        assigned: dict[str, ast.expr | None] = {}
        names = {node.name for node in tree.body if hasattr(node, "name")}
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    assigned |= {name.id: node.value for name in ast.walk(target) if isinstance(name, ast.Name)}
        public = {node.name for node in _public(tree.body)}
        if "__all__" not in assigned:
            assert not public, f"{file} has no __all__, and defines {sorted(public)}"
            continue
        listed = ast.literal_eval(assigned["__all__"] or ast.List([]))
        assert len(listed) == len(set(listed)), f"{file}: __all__ names something twice"
        assert public <= set(listed), f"{file}: {sorted(public - set(listed))} are public and not in __all__"
        assert set(listed) <= names | set(assigned), (
            f"{file}: {sorted(set(listed) - names - set(assigned))} are not there"
        )


@pytest.mark.parametrize("page", ["architecture.md", "crash-argument.md"])
def test_what_a_page_of_the_design_names_is_there(page: str) -> None:
    """Every file and function that it names is there."""
    named = re.findall(r"([a-z_/]+\.py)(?:::([A-Za-z_.]+))?", (HOUSE.parent / "docs/design" / page).read_text())
    assert sum(bool(name) for _, name in named) >= 5
    for file, name in named:
        path = HOUSE / file
        assert path.is_file() or any(HOUSE.glob(f"*/{file}")) or (HOUSE.parent / file).is_file(), f"{file} is not there"
        body: list[ast.stmt] = _tree(file).body if name else []
        for part in filter(None, name.split(".")):
            found = [node for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == part]
            assert found, f"{file} has no {name}"
            body = found[0].body


Chain = tuple[str, ...]  # functions, each called by the one before it


def _chains(call: Callable[[], Any]) -> list[Chain]:
    """Return the package's functions that a call calls, in order, each with those that it was called by."""
    found: dict[Chain, None] = {}
    house = f"{HOUSE}/"

    def look(frame: FrameType | None, event: str, _argument: Any) -> None:
        names: list[str] = []
        while event == "call" and frame is not None:
            code = frame.f_code
            if code.co_filename.startswith(house):
                names.append(f"{code.co_filename.removeprefix(house)}::{code.co_name}")
            frame = frame.f_back
        if names:
            found[tuple(reversed(names))] = None

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(found)


def _drawn() -> list[list[Chain]]:
    """Return the trees of the page, as chains. Of a method only its name counts: Python 3.10 knows no more of a frame."""
    page = (HOUSE.parent / "docs/design/architecture.md").read_text().partition("## The functions on the way")[2]
    trees = []
    for block in re.findall(r"```text\n(.*?)```", page.partition("\n## ")[0], re.DOTALL):
        tree, above = list[Chain](), list[str]()
        for indent, file, name in re.findall(r"^( *)([\w/]+\.py)::([\w.]+)", block, re.MULTILINE):
            above[len(indent) // 2 :] = [f"{file}::{name.rpartition('.')[2]}"]
            tree.append(tuple(above))
        trees.append(tree)
    return trees


def _goes_through(chain: Chain, drawn: Chain) -> bool:
    """Return whether a chain ends where a drawn one does, and comes by all that is drawn."""
    rest = iter(chain)
    return chain[-1] == drawn[-1] and all(name in rest for name in drawn)


def _hops(chain: Chain) -> int:
    files = [name.partition("::")[0] for name in chain]
    return sum(one != other for one, other in pairwise(files))


def _floor(function: str) -> int:
    return FLOORS[_room(function.partition("::")[0])]


def test_a_messages_way_is_as_the_page_draws_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trees of the architecture's page are what is called, in that order; no call leads up but those that it names."""
    monkeypatch.setattr(participant, "STALE", math.inf)  # on a busy machine each put would first look for credits
    message = {"image": torch.ones(1000), "step": 1}
    queue = tensorpipe_ipc.Queue()
    keep_pure(queue)
    address = f"ipc://{tmp_path}/way"
    with (
        tensorpipe_ipc.Consumer(address, shared_memory="off") as consumer,
        tensorpipe_ipc.Producer(address, shared_memory="off") as producer,
    ):
        with ThreadPoolExecutor(1) as other:  # the ends meet, and each schema is known
            for _ in range(2):
                putting = other.submit(producer.put, message, 60)
                consumer.get(60)
                putting.result()
                queue.put(message)
                queue.get()
        calls: list[Callable[[], Any]] = [
            lambda: queue.put(message),
            lambda: queue.get(),
            lambda: producer.put(message, 60),
            lambda: consumer.get(60),
        ]
        rounds = [[_chains(call) for call in calls] for _ in range(8)]
        ways = [min(tries, key=len) for tries in zip(*rounds, strict=True)]  # where nothing else was due
    trees = _drawn()
    assert len(trees) == len(ways)
    for tree, way in zip(trees, ways, strict=True):
        at = -1
        for drawn in tree:
            at = next((i for i, chain in enumerate(way) if i > at and _goes_through(chain, drawn)), -1)
            assert at >= 0, f"{' -> '.join(drawn)} is not on the way, or comes before what is drawn above it"
    reached = [
        max((_hops(chain) for chain in way if chain[-1] in ends), default=0)
        for way, ends in zip(ways, ENDS_OF_WAYS, strict=True)
    ]
    page = (HOUSE.parent / "docs/design/architecture.md").read_text()
    said = re.search(
        r"the bytes in (\d) hops.*reaches the socket in (\d),\s+and `Consumer.get` in (\d)", page, re.DOTALL
    )
    assert said is not None
    assert [reached[0], reached[2], reached[3]] == [int(hops) for hops in said.groups()]
    up = {
        callee for way in ways for chain in way for caller, callee in pairwise(chain) if _floor(callee) > _floor(caller)
    }
    assert {name.partition("::")[2] for name in up} <= {"encode", "decode", "decode_in"}


def test_decoders_are_made_at_import() -> None:
    """Every decoder of a type is made at import.

    If two threads were the first to decode a type, msgspec crashed the process: one saw the other's unfinished work.
    """
    for file in FILES:
        calls = [
            node
            for node in ast.walk(_tree(file))
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("msgspec")
        ]
        lazy = [ast.unparse(call) for call in calls if any(keyword.arg == "type" for keyword in call.keywords)]
        assert not lazy, f"{file}: {lazy}: call a module's own msgspec.msgpack.Decoder(type).decode"


def test_the_package_exports_what_it_says() -> None:
    """Every name in the package's ``__all__`` is an attribute of it."""
    assert [name for name in tensorpipe_ipc.__all__ if not hasattr(tensorpipe_ipc, name)] == []


_IMPORT = """
import os, sys, threading
import msgspec, numpy, psutil, torch, zmq

def state():
    return (
        sorted(os.listdir("/proc/self/task")),
        threading.enumerate(),
        sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")[:-1]),
        psutil.Process().children(),
        dict(os.environ),
        [os.path.join(at, name) for at, folders, files in os.walk(".") for name in folders + files],
        os.path.isdir(os.path.join(os.environ["XDG_RUNTIME_DIR"], "tensorpipe_ipc")),
    )

os.listdir("/proc/self/task"), psutil.Process().children()
before = state()
import tensorpipe_ipc
after = state()
assert before == after, (before, after)
unasked = {"tensorpipe_ipc.benchmark", "tensorpipe_ipc.cli", "rich", "matplotlib"} & sys.modules.keys()
assert not unasked, unasked
print("nothing happened")
"""


@pytest.mark.slow
def test_importing_does_nothing(tmp_path: Path) -> None:
    """Importing the package starts no thread or child, opens, writes and sets nothing, and imports no more than it needs."""
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(HOUSE.parent)!r})\n{_IMPORT}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=50)
    assert done.stdout == "nothing happened\n", done.stderr
