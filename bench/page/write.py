"""Results written out: the JSON, one HTML page with its pictures in it, and the same as Markdown with pictures beside it."""

from __future__ import annotations

import html
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from bench.page import growth_pictures, pictures, tables, words
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
        for line in words.summary(results):
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


class _Part(NamedTuple):
    heading: str
    sentence: str = ""
    picture: str = ""
    lines: Sequence[str] = ()
    table: tables.Table | None = None


def _parts(results: Results) -> Iterator[_Part]:
    """Return the page between its first table and its last lines."""
    if results["kind"] == "growth":
        for name in growth_pictures.PICTURES:
            if rows(results, "growth", **{"with": name}):
                heading = growth_pictures.ACROSS[name][1]
                yield _Part(
                    heading, growth_pictures.sentence(results, name), name, table=growth_pictures.table(results, name)
                )
        return
    by_name: dict[str, Any] = {"one way": tables.one_way, "stream": tables.stream}
    for name, heading in CAPTIONS.items():
        if not rows(results, name):
            continue
        sentence = words.sentence(results, name)
        if name in by_name:
            yield _Part(heading, sentence, name, list(words.quicker(results, name)), by_name[name](results))
        else:
            yield _Part(heading, sentence, name)
    if rows(results, "deaths"):
        tries = rows(results, "deaths")[0]["tries"]
        heading = f"When a process is killed (each tried {tries} times; every wait bounded)"
        yield _Part(heading, words.sentence(results, "deaths"), table=tables.deaths(results))
    yield _Part("Who took part, in which version, and how", table=tables.peers(results))
    if results["failed"]:
        yield _Part("Who could not", table=tables.failures(results))


def _title(results: Results) -> str:
    return "How it grows" if results["kind"] == "growth" else "tensorpipe_ipc beside what people use"


def _first(results: Results) -> tuple[str, tables.Table | None]:
    """Return the page's first sentence, and the table below it."""
    if results["kind"] == "growth":
        return "One-way time and memory of our Queue, as each of these grows by itself.", None
    return words.headline(results), tables.headline(results) if rows(results, "one way") else None


def _where(results: Results) -> str:
    machine = results["machine"]
    parts = [results["date"], *(f"{name} {value}" for name, value in machine.items() if name != "name")]
    if "load" in results:
        parts.append(f"load {results['load']:.1f} when it began")
    return " · ".join(parts)


def _markdown(results: Results, drawn: dict[str, str], name: str) -> str:
    sentence, table = _first(results)
    command = f"`{results['command']}`"
    lines = [f"# {_title(results)}", "", f"**{sentence}**", ""]
    if table is not None:
        lines += [tables.markdown(table), "", f"{tables.LEGEND} {command}", ""]
    for part in _parts(results):
        lines += [f"## {part.heading}", ""]
        lines += [part.sentence, ""] if part.sentence else []
        lines += (
            [f"![{part.heading}]({name}/{part.picture.replace(' ', '-')}.svg)", ""] if part.picture in drawn else []
        )
        lines += [*(f"* {line}" for line in part.lines), ""] if part.lines else []
        lines += [tables.markdown(part.table), ""] if part.table is not None else []
        lines += [command, ""]
    if results["kind"] != "growth":
        lines += ["## How it was measured", "", HOW, ""]
    return "\n".join([*lines, "## Where", "", f"{command} · {_where(results)}", ""])


STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;font-size:13px;margin:1em 0}td,th{padding:.2em .6em;border-bottom:1px solid #ddd;"
    "text-align:left;vertical-align:top}svg{max-width:100%;height:auto}code{background:#f4f4f4;padding:.1em .3em}"
    ".dim{color:#666;font-size:13px}.first{font-size:19px}"
)


def _html(results: Results, drawn: dict[str, str]) -> str:
    title = html.escape(_title(results))
    command = f"<code>{html.escape(results['command'])}</code>"
    sentence, table = _first(results)
    body = [f'<h1>{title}</h1><p class="first">{html.escape(sentence)}</p>']
    if table is not None:
        body.append(f'{_html_table(table)}<p class="dim">{html.escape(tables.LEGEND)} {command}</p>')
    for part in _parts(results):
        body.append(f"<h2>{html.escape(part.heading)}</h2>")
        body.append(f"<p>{html.escape(part.sentence)}</p>" if part.sentence else "")
        if part.picture in drawn:
            svg = drawn[part.picture]
            body.append(svg[svg.index("<svg") :])
        more = _html_list(part.lines) if part.lines else ""
        more += _html_table(part.table) if part.table is not None else ""
        body.append(f"<details><summary>all numbers</summary>{more}</details>" if part.picture and more else more)
        body.append(f'<p class="dim">{command}</p>')
    if results["kind"] != "growth":
        body.append(f"<h2>How it was measured</h2><p>{html.escape(HOW)}</p>")
    body.append(f"<h2>Where</h2><p>{command} · {html.escape(_where(results))}</p>")
    head = f'<meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(body)}</body></html>\n"


def _html_list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>"


def _html_table(table: tables.Table) -> str:
    rows_ = ["".join(f"<th>{html.escape(heading)}</th>" for heading in table.headings)]
    for row in table.rows:
        cells = [f"<b>{html.escape(cell[1:])}</b>" if cell[:1] == "*" else html.escape(cell) for cell in row]
        rows_.append("".join(f"<td>{cell}</td>" for cell in cells))
    return "<table>" + "".join(f"<tr>{row}</tr>" for row in rows_) + "</table>"
