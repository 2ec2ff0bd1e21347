"""Measure how long a message takes, and how many go in a second, by this package's queues and endpoints or your own pipeline.

::

    from tensorpipe_ipc import benchmark

    print(benchmark.latency(sizes=["400B", "4MB"]))
    print(benchmark.throughput(benchmark.OverEndpoint("tcp", shared_memory="off"), ["4MB"], producers=2))
    print(benchmark.latency(round_trip=True))                            # there and back, beside one way
    report = benchmark.latency(make=my_batch)                            # your own messages
    report = benchmark.latency(benchmark.Ends(queue.put, queue.get))     # your own put and get
    report.results[0].one_way.p99_us

It starts processes, and leaves none. ``tensorpipe-ipc latency`` and ``throughput`` are this, as commands.

Bottom up: ``messages`` (what is sent), ``pipelines`` (through what), ``crew`` (the processes), ``programs`` (what they do, and
when the clock runs), ``summary`` and ``report`` (what was found), ``measuring`` (how many rounds), ``one_way``, ``stream``.
"""

from tensorpipe_ipc.benchmark.messages import Make
from tensorpipe_ipc.benchmark.one_way import latency
from tensorpipe_ipc.benchmark.pipelines import Ends, OverEndpoint, OverQueue, Pipeline
from tensorpipe_ipc.benchmark.report import (
    Floors,
    LatencyReport,
    LatencyResult,
    MemoryUse,
    Setup,
    ThroughputReport,
    ThroughputResult,
)
from tensorpipe_ipc.benchmark.stream import throughput
from tensorpipe_ipc.benchmark.summary import Percentiles

__all__ = [
    "Ends",
    "Floors",
    "LatencyReport",
    "LatencyResult",
    "Make",
    "MemoryUse",
    "OverEndpoint",
    "OverQueue",
    "Percentiles",
    "Pipeline",
    "Setup",
    "ThroughputReport",
    "ThroughputResult",
    "latency",
    "throughput",
]
