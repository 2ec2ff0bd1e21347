"""The campaigns, as much of them as seconds allow, more with ``make kills``; and that the judges find what they look for."""

from __future__ import annotations

import re
from pathlib import Path

import campaign
import pytest
from programs import ran_in_fork

from tests.endpoint_campaign import Fate


def campaign_of(options: str, *least: tuple[int, str], folder: Path) -> str:
    """Run a campaign. Of each of these there were at least so many, as its last line says, which is returned."""
    done = ran_in_fork("-m", "tests.campaign", *options.split(), folder=folder)
    assert done.status == 0, done.err
    last = done.out.splitlines()[-1]
    for count, what in least:
        assert number(last, what) >= count
    return last


def number(line: str, what: str) -> int:
    """Return the number in front of ``what`` in a line."""
    found = re.search(rf"([\d,]+) {what}", line)
    assert found, line
    return int(found[1].replace(",", ""))


@pytest.mark.slow
def test_a_short_campaign(tmp_path: Path) -> None:
    """Small and large messages in 64 MiB, idle producers, some kills, every kind of queue."""
    campaign_of("--kills 15 --messages 3000 --seed 1", (15, "kills"), (3000, "messages put"), folder=tmp_path)


@pytest.mark.kills
@pytest.mark.limit(110)
@pytest.mark.parametrize(
    ("options", "least"),
    [
        ("--kills 2 --closes 12 --messages 500 --seed 1", [(2, "kills"), (12, "closes"), (500, "messages put")]),
        ("--kills 15 --closes 60 --part 5 --seed 3", [(15, "kills"), (60, "closes")]),
    ],
    ids=["short", "every kind of stream"],
)
def test_a_campaign_of_endpoints(options: str, least: list[tuple[int, str]], tmp_path: Path) -> None:
    """Several ends in each program close, fail and are killed while peers are stopped, and every stream ends as it must."""
    campaign_of(f"--endpoints {options}", *least, folder=tmp_path)


@pytest.mark.kills
@pytest.mark.limit(110)
def test_random_kills_lose_nothing_that_was_promised(tmp_path: Path) -> None:
    """200 SIGKILLs and 100,000 messages, and everything that the contract says of them holds."""
    least = (200, "kills"), (100_000, "messages put")
    campaign_of("--kills 200 --messages 100000 --part 200", *least, folder=tmp_path)


@pytest.mark.kills
@pytest.mark.limit(110)
def test_without_deaths_every_message_comes_exactly_once(tmp_path: Path) -> None:
    """Eight processes, three kinds of queue, nobody killed: nothing is missing, nothing counted as lost."""
    last = campaign_of("--kills 0 --messages 20000", folder=tmp_path)
    assert number(last, "messages put") == number(last, "got")
    assert number(last, "missing") == number(last, "counted as lost") == 0


@pytest.mark.parametrize(
    ("fate", "complaint"),
    [
        (Fate(10, missing=0, lost=0, told=0, dead=0, unsure=0), None),
        (Fate(10, missing=1, lost=0, told=0, dead=0, unsure=0), "not counted"),
        (Fate(10, missing=3, lost=2, told=2, dead=1, unsure=0), None),
        (Fate(10, missing=4, lost=2, told=2, dead=1, unsure=0), "not counted"),
        (Fate(10, missing=1, lost=2, told=2, dead=1, unsure=0), "not missing"),
        (Fate(10, missing=1, lost=2, told=2, dead=1, unsure=4), None),
        (Fate(10, missing=2, lost=2, told=0, dead=0, unsure=0), "not told"),
    ],
)
def test_the_judge_of_endpoints_finds_what_is_missing(fate: Fate, complaint: str | None) -> None:
    """More is missing than was counted, more counted than is missing, or it was not told: each is found."""
    if complaint is None:
        fate.check("whose")
    else:
        with pytest.raises(AssertionError, match=complaint):
            fate.check("whose")


def test_the_judge_of_endpoints_finds_what_a_killed_producer_could_not_have_lost() -> None:
    """The judge accepts missing messages of a killed producer only if consumers that are gone left them behind."""
    Fate(10, missing=4, lost=0, told=0, dead=0, unsure=4).check("whose", killed=True)
    with pytest.raises(AssertionError, match="missing"):
        Fate(10, missing=5, lost=0, told=0, dead=0, unsure=4).check("whose", killed=True)


def words(tmp_path: Path, name: str, *values: int) -> memoryview:
    """A journal with these words."""
    made = campaign.journal(tmp_path / name, 64)
    for index, value in enumerate(values):
        made[index] = value
    return made


def entries(tmp_path: Path, name: str, *entries: int) -> memoryview:
    """A consumer's journal."""
    return words(tmp_path, name, len(entries), *entries)


CAME = [1 << 40 | number for number in range(4)]  # producer 1's messages


@pytest.mark.parametrize(
    ("got", "lost", "complaint"),
    [
        ([CAME], 0, None),
        ([CAME[:2], CAME[2:]], 0, None),
        ([CAME[::2]], 2, None),
        ([CAME[::2]], 1, "missing"),
        ([CAME], 3, "at most"),
        ([CAME[::-1]], 0, "out of order"),
        ([[*CAME, CAME[3]]], 0, "out of order"),
        ([CAME, CAME[:1]], 0, "twice"),
        ([[*CAME, CAME[3] + 1]], 0, "never put"),
        ([[*CAME[:3], CAME[3] | campaign.BROKEN]], 0, "wrong"),
    ],
)
def test_the_judge_finds_what_is_wrong(tmp_path: Path, got: list[list[int]], lost: int, complaint: str | None) -> None:
    """Missing, counted too often, out of order, twice, from nowhere, broken: each is found."""
    judge = campaign.Judge()
    judge.producer(1, words(tmp_path, "put", 4, 4))
    judge.most_lost = 2

    def all_of_it() -> None:
        for number, each in enumerate(got):
            judge.consumer(entries(tmp_path, f"got{number}", *each))
        judge.verdict(lost)

    if complaint is None:
        all_of_it()
    else:
        with pytest.raises(AssertionError, match=complaint):
            all_of_it()
