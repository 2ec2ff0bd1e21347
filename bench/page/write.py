"""Results written out: the JSON, one HTML page with its pictures in it, and the same as Markdown with pictures beside it."""

from __future__ import annotations

import html
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.page import growth_pictures, pictures, tables
from bench.page.results import Results, name_of, rows

__all__ = ["write"]

HOW = (
    "One way: from before put to after get on CLOCK_MONOTONIC, the receiver waiting, each message in new memory of the "
    "sender's own; a stream: all messages made before. Every peer has a process tree of its own, half of the cores for its "
    "senders and half for its receivers, and a turn in every round. Numbers are medians of rounds; in brackets: as a "
    "multiple of ours, the median of the same rounds' ratios, lowest..highest. Content is checked when the clock has been "
    "read. Of each family of peers the pictures show the fastest."
)
CAPTIONS = {
    "one way": "One way",
    "stream": "Throughput",
    "trees": "Many small tensors",
    "held": "Memory and descriptors",
    "fans": "Several producers, several consumers",
}


def write(results: Results, folder: str | Path, console: Console | None = None) -> None:
    """Write all of it, and say where."""
    folder, name = Path(folder), name_of(results)
    drawn = draw(results)
    (folder / name).mkdir(parents=True, exist_ok=True)
    for picture, svg in drawn.items():
        (folder / name / f"{picture.replace(' ', '-')}.svg").write_text(svg)
    (folder / f"{name}.json").write_text(json.dumps(results, indent=1))
    (folder / f"{name}.md").write_text(_markdown(results, drawn, name))
    (folder / f"{name}.html").write_text(_html(results, drawn))
    if console is not None:
        for line in summary(results):
            console.print(line, highlight=False)
        console.print(f"{folder / name}.html, .md and .json", highlight=False)


def draw(results: Results) -> dict[str, str]:
    """All pictures for which there are results, as SVG."""
    from matplotlib import pyplot

    made = growth_pictures.PICTURES if results["kind"] == "growth" else pictures.PICTURES
    found = {}
    for name, picture in made.items():
        if rows(results, "growth", **{"with": name}) if results["kind"] == "growth" else rows(results, name):
            figure = picture(results)
            text = io.StringIO()
            figure.savefig(text, format="svg", metadata={"Date": None})
            pyplot.close(figure)
            found[name] = text.getvalue()
    return found


def summary(results: Results) -> Iterator[str]:
    """What is found, in a few lines."""
    if results["kind"] == "growth":
        yield from growth_pictures.summary(results)
        return
    for item, verb in (("one way", "one way"), ("stream", "a message of a stream")):
        for nbytes in dict.fromkeys(row["nbytes"] for row in rows(results, item)):
            of = {row["peer"]: row for row in rows(results, item, nbytes=nbytes)}
            if "ours" not in of:
                continue
            family_of = {peer["peer"]: peer["family"] for peer in results["peers"]}
            theirs = {
                name: row for name, row in of.items() if family_of[name] not in ("floor", "ours", "ours, endpoints")
            }
            ahead = sorted((row["to_ours"]["median"], name) for name, row in theirs.items())
            quicker = [f"{name} {ratio:.2f}" for ratio, name in ahead if ratio < 0.97]
            words = f"quicker, as multiples: {', '.join(quicker)}" if quicker else "nobody is quicker"
            yield f"{tables.size(nbytes)}, {verb}: ours {tables.short_time(of['ours']['us']['median'])}; {words}"


def _parts(results: Results) -> Iterator[tuple[str, str, tables.Table | None]]:
    """Headings, a picture's name or none, and the table that goes with it."""
    if results["kind"] == "growth":
        for name in growth_pictures.PICTURES:
            if rows(results, "growth", **{"with": name}):
                yield growth_pictures.ACROSS[name][1], name, growth_pictures.table(results, name)
        return
    by_name: dict[str, Any] = {"one way": tables.one_way, "stream": tables.stream}
    for name, heading in CAPTIONS.items():
        if rows(results, name):
            yield heading, name, by_name[name](results) if name in by_name else None
    if rows(results, "deaths"):
        tries = rows(results, "deaths")[0]["tries"]
        yield f"When a process is killed (each tried {tries} times; every wait bounded)", "", tables.deaths(results)
    yield "Who took part, and how", "", tables.peers(results)
    if results["failed"]:
        yield "Who could not", "", tables.failures(results)


def _title(results: Results) -> str:
    return "How it grows" if results["kind"] == "growth" else "tensorpipe_ipc beside what people use"


def _where(results: Results) -> str:
    machine = results["machine"]
    return f"{results['date']} · " + " · ".join(f"{name} {value}" for name, value in machine.items() if name != "name")


def _markdown(results: Results, drawn: dict[str, str], name: str) -> str:
    lines = [f"# {_title(results)}", "", f"`{results['command']}` · {_where(results)}", ""]
    lines += [f"* {line}" for line in summary(results)] + [""]
    if results["kind"] != "growth":
        lines += [HOW, ""]
    for heading, picture, table in _parts(results):
        lines += [f"## {heading}", ""]
        if picture in drawn:
            lines += [f"![{heading}]({name}/{picture.replace(' ', '-')}.svg)", ""]
        if table is not None:
            lines += [tables.markdown(table), ""]
        lines += [f"`{results['command']}`", ""]
    return "\n".join(lines)


STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;font-size:13px;margin:1em 0}td,th{padding:.2em .6em;border-bottom:1px solid #ddd;"
    "text-align:left;vertical-align:top}svg{max-width:100%;height:auto}code{background:#f4f4f4;padding:.1em .3em}"
    ".dim{color:#666;font-size:13px}"
)


def _html(results: Results, drawn: dict[str, str]) -> str:
    title = html.escape(_title(results))
    command = f'<p class="dim"><code>{html.escape(results["command"])}</code></p>'
    body = [f"<h1>{title}</h1>", command, f'<p class="dim">{html.escape(_where(results))}</p>', "<ul>"]
    body += [f"<li>{html.escape(line)}</li>" for line in summary(results)] + ["</ul>"]
    for heading, picture, table in _parts(results):
        body.append(f"<h2>{html.escape(heading)}</h2>")
        if picture in drawn:
            svg = drawn[picture]
            body.append(svg[svg.index("<svg") :])
        if table is not None:
            inner = _html_table(table)
            body.append(f"<details><summary>all numbers</summary>{inner}</details>" if picture else inner)
        body.append(command)
    if results["kind"] != "growth":
        body.append(f'<h2>How it was measured</h2><p class="dim">{html.escape(HOW)}</p>')
    head = f'<meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(body)}</body></html>\n"


def _html_table(table: tables.Table) -> str:
    rows_ = ["".join(f"<th>{html.escape(heading)}</th>" for heading in table.headings)]
    for row in table.rows:
        cells = [f"<b>{html.escape(cell[1:])}</b>" if cell[:1] == "*" else html.escape(cell) for cell in row]
        rows_.append("".join(f"<td>{cell}</td>" for cell in cells))
    return "<table>" + "".join(f"<tr>{row}</tr>" for row in rows_) + "</table>"
