"""The tables of the comparisons beside ``all``, from what each has found. A cell is a median of rounds, lowest..highest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.measure import Ratio
from bench.page.tables import Table, set_off, short_time, size, two

__all__ = ["DETAILS"]

Found = Mapping[str, Any]
Row = dict[str, Any]


def _spread(found: Ratio | Sequence[float]) -> str:
    median, lowest, highest = found
    return f"{two(median)} ({two(lowest)}..{two(highest)})"


# -- bench queue


def _queue(found: Found, *items: str) -> list[Table]:
    """Of each item its figures, rivals below one another, and the ratios."""
    made = []
    for item in (each for each in found["items"] if each["item"] in items):
        made.append(_by_measure(item))
        if item["ratios"]:
            ratios = [[row["what"], _spread((row["value"], row["lowest"], row["highest"]))] for row in item["ratios"]]
            made.append(Table(["Ratios of the same rounds", "median (lowest..highest)"], ratios))
    return made


def _by_measure(item: Row) -> Table:
    measures = list(dict.fromkeys(row["measure"] for row in item["rows"]))
    lines = []
    for rival in dict.fromkeys(row["rival"] for row in item["rows"]):
        of = {row["measure"]: row["p50"] for row in item["rows"] if row["rival"] == rival}
        cells = [_figure(of[measure], item["unit"]) if measure in of else "-" for measure in measures]
        lines.append(set_off([rival, *cells]))
    return Table([f"{item['title']}{', a second' if item['unit'] == 'a second' else ''}", *measures], lines)


def _figure(microseconds: float, unit: str) -> str:
    return f"{1e6 / microseconds:,.0f}" if unit == "a second" else short_time(microseconds)


# -- bench dataloader


def _loaders(found: Found) -> list[Table]:
    return [_by_workers([row for row in found["rows"] if row["what"] in ("ready", "work")])]


def _pools(found: Found) -> list[Table]:
    rows = [row for row in found["rows"] if row["what"] not in ("ready", "work")]
    calls = list(dict.fromkeys(row["what"] for row in rows))
    lines = []
    for case in dict.fromkeys(row["case"] for row in rows):
        of = {row["what"]: row for row in rows if row["case"] == case}
        lines.append(
            [{"pool": "`Pool`", "executor": "`ProcessPoolExecutor`"}[case], *(_times(of[call]) for call in calls)]
        )
    return [Table(["calls a second, as a multiple of stock", *calls], lines)]


def _by_workers(rows: list[Row]) -> Table:
    kinds = list(dict.fromkeys((row["what"], row["workers"]) for row in rows))
    named = {"ready": "samples that are ready", "work": "samples that take work"}
    headings = [f"{named[what]}, {workers} worker{'s' * (workers > 1)}" for what, workers in kinds]
    lines = []
    for case in dict.fromkeys(row["case"] for row in rows):
        of = {(row["what"], row["workers"]): row for row in rows if row["case"] == case}
        lines.append([case, *(_times(of[kind]) for kind in kinds)])
    return Table(["batches a second, as a multiple of stock", *headings], lines)


def _times(row: Row) -> str:
    return _spread((row["ratio"], row["lowest"], row["highest"]))


# -- bench endpoints, tcp


def _endpoints(found: Found) -> list[Table]:
    lines = []
    for row in found["rows"]:
        one_way, rate = row["one_way_ratio"], row["rate_ratio"]
        cells = [one_way["ours"], one_way["in frames"], rate["ours"], rate["in frames"], row["queue_ratio"]]
        lines.append([f"{size(row['size'])}, {row['transport']}", *map(_spread, cells)])
    headings = ["time one way / bare", "in frames", "messages a second / bare", "in frames", "time one way / `Queue`"]
    return [Table(["", *headings], lines)]


def _tcp(found: Found) -> list[Table]:
    rows = found["rows"]
    rates = [[rival, *(f"{row['rate'][rival]:.2f}" for row in rows)] for rival in rows[0]["rate"]]
    sizes = [size(row["size"]) for row in rows]
    named = {
        "to_pyzmq": "ours / the better of pyzmq's two",
        "to_bare": "ours / bare sockets",
        "keys_to_none": "with keys / without",
    }
    ratios = [[text, *(_spread(row[name]) for row in rows)] for name, text in named.items()]
    return [
        Table(["GB a second", *sizes], [set_off(line) for line in rates]),
        Table(["Ratios of the same rounds", *sizes], ratios),
    ]


# -- bench precision, serializers


def _precision(found: Found) -> list[Table]:
    rows = found["rows"]
    kinds = list(dict.fromkeys((row["transport"], row["size"]) for row in rows))
    lines = []
    for dtype in dict.fromkeys(row["wire_dtype"] for row in rows):
        of = {(row["transport"], row["size"]): row for row in rows if row["wire_dtype"] == dtype}
        plain = dtype == "float32"
        cells = [
            short_time(1e3 * of[kind]["milliseconds"]) if plain else _spread(of[kind]["to_float32"]) for kind in kinds
        ]
        lines.append([dtype + (", one way" if plain else ", as a multiple of it"), *cells])
    return [Table(["crosses as", *(f"{nbytes}, {way}" for way, nbytes in kinds)], lines)]


def _serializers(found: Found) -> list[Table]:
    return [_each_way(found, "serialize", "to bytes"), _each_way(found, "deserialize", "from bytes")]


def _each_way(found: Found, way: str, told: str) -> Table:
    shapes = list(dict.fromkeys(tuple(row["shape"]) for row in found["results"]))
    lines = []
    for method in dict.fromkeys(row["method"] for row in found["results"]):
        of = {tuple(row["shape"]): row for row in found["results"] if row["method"] == method}
        raws = method.startswith("raw")
        cells = [
            short_time(1e3 * of[shape][f"{way}_ms"]) + ("" if raws else f"; {_spread(of[shape][f'{way}_vs_raw'])}")
            for shape in shapes
        ]
        lines.append([f"*{cell}" for cell in (method, *cells)] if raws else [method, *cells])
    return Table([f"{told}: time; as a multiple of `raw`'s", *(str(shape) for shape in shapes)], lines)


DETAILS: dict[str, tuple[str, Callable[[Found], list[Table]]]] = {  # by the marks' name: whose results, and how shown
    "one way": ("queue", lambda found: _queue(found, "one-way", "loan")),
    "streams": ("queue", lambda found: _queue(found, "stream", "fan")),
    "trees": ("queue", lambda found: _queue(found, "tree")),
    "growth": ("queue", lambda found: _queue(found, "flat")),
    "loaders": ("dataloader", _loaders),
    "pools": ("dataloader", _pools),
    "endpoints": ("endpoints", _endpoints),
    "tcp": ("tcp", _tcp),
    "precision": ("precision", _precision),
    "serializers": ("serializers", _serializers),
}
