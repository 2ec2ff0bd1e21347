"""CPython's own tests of multiprocessing's queues, run on ours: ``python conformance_queue.py fork|spawn|forkserver``.

Run are all of WithProcessesTestQueue, and every other case of CPython's that hands a queue to a process. Both levels
are replaced (the names in the module are bound methods), and ``close_queue``, which asks for the class. Children import
this file again, so everything is at module level; which start method, the environment tells them.
"""

from __future__ import annotations

import collections
import multiprocessing
import multiprocessing.context
import os
import sys
import unittest
from collections.abc import Iterator
from typing import Any

import test._test_multiprocessing as cpython

import tensorpipe_ipc

if len(sys.argv) > 1:
    os.environ.setdefault("TENSORPIPE_IPC_START_METHOD", sys.argv[1])

KINDS = ("Queue", "SimpleQueue", "JoinableQueue")
WAIVED = {
    # put raises in the caller: there is no feeder thread that would have to go on, or to tell of it.
    "test_queue_feeder_donot_stop_onexc": "a feeder thread's errors",
    "test_queue_feeder_on_queue_feeder_error": "a feeder thread's errors",
    # It wants an error where a queue of a fork context is passed to a spawned process. Here that works.
    "test_mixed_startmethod": "an error that a queue's locks raise",
}
CASES = {
    "WithProcessesTestQueue": (),  # all
    "WithProcessesTestProcess": (
        "test_args_argument",
        "test_process",
        "test_process_mainthread_native_id",
        "test_close",
        "test_lose_target_ref",
        "test_child_fd_inflation",
    ),
    "WithProcessesTestBarrier": ("test_wait_return",),
    "TestStdinBadfiledescriptor": ("test_queue_in_process",),
    "TestStartMethod": ("test_nested_startmethod", "test_mixed_startmethod"),
    "TestSimpleQueue": (),
}
made = collections.Counter()


def maker(kind: Any) -> Any:
    """Return a function that makes queues of ours of that kind, and counts them.

    A count too low would mean that the replacement did not take.
    """

    def make(*args: Any, **kwargs: Any) -> Any:
        made[kind] += 1
        return getattr(tensorpipe_ipc, kind)(*args, **kwargs)

    return make


def of_context(make: Any) -> Any:
    """The same as a method of a context."""
    return lambda self, *args, **kwargs: make(*args, ctx=self, **kwargs)


def close_queue(queue: Any) -> None:
    """As CPython's, for any class."""
    if hasattr(queue, "close"):
        queue.close()
        queue.join_thread()


for each in KINDS:
    make = maker(each)
    setattr(multiprocessing, each, make)
    setattr(multiprocessing.context.BaseContext, each, of_context(make))
    if hasattr(cpython.ProcessesMixin, each):
        setattr(cpython.ProcessesMixin, each, staticmethod(make))
cpython.close_queue = close_queue
cpython.PRELOAD = [
    "tensorpipe_ipc.queues.tensor_queue"
]  # so that the children of a fork server need not import torch each
cpython.install_tests_in_module_dict(globals(), os.environ["TENSORPIPE_IPC_START_METHOD"])


def cases() -> Iterator[Any]:
    """Yield those of CPython's cases that concern a queue."""
    for name, methods in CASES.items():
        if name not in (sys.argv[2:] or CASES):
            continue
        for case in unittest.defaultTestLoader.loadTestsFromTestCase(globals()[name]):
            method = case._testMethodName
            if method in (methods or [method]) and not {method, f"{name}.{method}"} & WAIVED.keys():
                yield case


def main() -> None:
    """Run them, print how many ran and how many queues were made, and exit with 1 where one failed."""
    setUpModule()  # noqa: F821 - CPython's, installed above
    result = unittest.TextTestRunner(verbosity=2).run(unittest.TestSuite(cases()))
    print(
        f"{result.testsRun} ran, {len(result.skipped)} skipped,", ", ".join(f"{n} {kind}" for kind, n in made.items())
    )
    sys.exit(not result.wasSuccessful())


if __name__ == "__main__":
    main()
