"""The page in sentences: what the whole run says, what each picture shows, and who is quicker than ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bench.page import growth_pictures
from bench.page.results import Results, rows
from bench.page.tables import short_time, size

__all__ = ["STOCK", "headline", "quicker", "sentence", "summary"]

OURS, STOCK, MEMCPY = "ours", "torch Queue, fd", "one memcpy"
NO_RIVALS = ("floor", "ours", "ours, endpoints")
Row = dict[str, Any]


def headline(results: Results) -> str:
    """The run in one or two sentences: ours beside what torch's users have, and how far from a copy."""
    found = rows(results, "one way", peer=OURS)
    if not found:
        return f"A part of the comparison: {', '.join(dict.fromkeys(row['item'] for row in results['rows']))}."
    parts = []
    for nbytes in dict.fromkeys((found[-1]["nbytes"], found[0]["nbytes"])):
        at = _at(results, "one way", nbytes=nbytes)
        words = f"{size(nbytes)} in {_time(at[OURS])}"
        if STOCK in at:
            words += f" (torch.multiprocessing.Queue: {_time(at[STOCK])}, {_ratio(at[STOCK])} times as long)"
        parts.append(words)
    text = f"Our Queue moves a tensor of {' and one of '.join(parts)}, from put to get in a process that waits."
    rivals = _rivals(results, "one way", nbytes=found[-1]["nbytes"])
    if rivals:
        text += " " + _ahead(rivals, f"At {size(found[-1]['nbytes'])} ")
    return text


def summary(results: Results) -> Iterator[str]:
    """Return the results in a few lines, for the terminal."""
    if results["kind"] == "growth":
        yield from growth_pictures.summary(results)
        return
    yield headline(results)
    for item in ("one way", "stream"):
        yield from quicker(results, item)


def quicker(results: Results, item: str) -> Iterator[str]:
    """Of each size, who is quicker than ours."""
    for nbytes in dict.fromkeys(row["nbytes"] for row in rows(results, item, peer=OURS)):
        ours = _at(results, item, nbytes=nbytes)[OURS]
        ahead = [f"{row['peer']} {_ratio(row)}" for row in _rivals(results, item, nbytes=nbytes) if _is_ahead(row)]
        who = f"quicker, as multiples of ours: {', '.join(ahead)}" if ahead else "nobody is quicker"
        what = "one way" if item == "one way" else "a message of a stream"
        yield f"{size(nbytes)}, {what}: ours {_time(ours)}; {who}"


def sentence(results: Results, item: str) -> str:
    """Return a sentence on an item; "" where ours took no part."""
    return SENTENCES[item](results) if rows(results, item, peer=OURS) else ""


def _one_way(results: Results) -> str:
    of = rows(results, "one way", peer=OURS)
    at = _at(results, "one way", nbytes=of[-1]["nbytes"])
    text = (
        f"The thick line is ours, the grey ones are the least the machine allows: {size(of[-1]['nbytes'])} take ours "
    )
    text += _time(at[OURS])
    if MEMCPY in at:
        text += f", {at[OURS]['us']['median'] / at[MEMCPY]['us']['median']:.2g} times one memcpy"
    smallest = of[0]["nbytes"]
    return f"{text}. {_ahead(_rivals(results, 'one way', nbytes=smallest), f'At {size(smallest)} ')}"


def _stream(results: Results) -> str:
    best = min(rows(results, "stream", peer=OURS), key=lambda row: row["us"]["median"] / row["nbytes"])
    rate = best["nbytes"] / best["us"]["median"] / 1e3
    rivals = _rivals(results, "stream", nbytes=best["nbytes"])
    return f"Ours carries most in tensors of {size(best['nbytes'])}: {rate:.2g} GB/s. {_ahead(rivals, 'There ')}"


def _trees(results: Results) -> str:
    of = rows(results, "trees", peer=OURS)
    most = of[-1]["leaves"]
    found = [row for row in _rivals(results, "trees", leaves=most) if row["peer"] != OURS]
    text = f"A dict of {most:,} takes ours {_time(of[-1])}"
    if found:
        first, last = (f"{_ratio(row)} ({row['peer']})" for row in (found[0], found[-1]))
        text += f"; the others take {first} to {last} times as long"
    return f"{text}."


def _held(results: Results) -> str:
    found = [row for row in rows(results, "held") if "descriptors" in row]
    most = max(row["held"] for row in found)
    last = {row["peer"]: row for row in found if row["held"] == most}
    if OURS not in last:
        return ""
    ours = last[OURS]
    text = f"{most:,} tensors held cost us {ours['descriptors']:,} file descriptors and {size(max(0, ours['memory']))}"
    others = [row for peer, row in last.items() if peer != OURS]
    if others:
        greedy = max(others, key=lambda row: int(row["descriptors"]))
        text += f", and {greedy['peer']} {greedy['descriptors']:,} descriptors"
    return f"{text}. Where a system allows 1,024 descriptors, a process that holds more fails."


def _fans(results: Results) -> str:
    parts = []
    for one, many in (("receivers", "senders"), ("senders", "receivers")):
        found = rows(results, "fans", **{one: 1})
        most = max(row[many] for row in found)
        last = sorted((row for row in found if row[many] == most), key=lambda row: row["us"]["median"])
        ours = next((row for row in last if row["peer"] == OURS), None)
        if ours is None:
            continue
        place = last.index(ours) + 1
        parts.append(
            f"with {most} {many} ours passes {1e6 / ours['us']['median']:,.0f} a second, {_place(place, len(last))}"
        )
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}."


def _deaths(results: Results) -> str:
    hang = [
        row["peer"]
        for row in rows(results, "deaths")
        if row["peer"] != OURS and any("hangs" in row[who] for who in ("consumer", "producer"))
    ]
    ours = rows(results, "deaths", peer=OURS)
    text = (
        f"Ours: {ours[0]['consumer']} when a consumer is killed, {ours[0]['producer']} when a producer is. "
        if ours
        else ""
    )
    return f"{text}Others that hang in one of the cases: {', '.join(hang) or 'none'}."


SENTENCES: dict[str, Callable[[Results], str]] = {
    "one way": _one_way,
    "stream": _stream,
    "trees": _trees,
    "held": _held,
    "fans": _fans,
    "deaths": _deaths,
}


def _at(results: Results, item: str, **what: int) -> dict[str, Row]:
    return {row["peer"]: row for row in rows(results, item, **what)}


def _rivals(results: Results, item: str, **what: int) -> list[Row]:
    """Rows of those who are neither ours nor floors, the quickest first."""
    family_of = {peer["peer"]: peer["family"] for peer in results["peers"]}
    found = [row for row in rows(results, item, **what) if family_of[row["peer"]] not in NO_RIVALS and "to_ours" in row]
    return sorted(found, key=lambda row: float(row["to_ours"]["median"]))


def _is_ahead(row: Row) -> bool:
    return bool(row["to_ours"]["median"] < 0.97)


def _ahead(rivals: Sequence[Row], where: str = "") -> str:
    """Return how many of the others are quicker, and the quickest of them; "" where there are none."""
    if not rivals:
        return ""
    best, ahead, count = rivals[0], sum(map(_is_ahead, rivals)), len(rivals)
    if not ahead:
        return f"{where}none of the {count} others is quicker; the next, {best['peer']}, takes {_ratio(best)} times as long."
    verb = "is" if ahead == 1 else "are"
    return (
        f"{where}{ahead} of the {count} others {verb} quicker, most of all {best['peer']}: {_ratio(best)} of our time."
    )


def _place(place: int, of: int) -> str:
    return f"most of {of}" if place == 1 else f"which is place {place} of {of}"


def _time(row: Row) -> str:
    return short_time(row["us"]["median"])


def _ratio(row: Row) -> str:
    value = row["to_ours"]["median"]
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
