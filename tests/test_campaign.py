"""The kill campaign, as much of it as a minute allows; and that the judge would have found what it looks for."""

from __future__ import annotations

import re
from pathlib import Path

import campaign
import pytest
from programs import ran

from tests.endpoint_campaign import Fate

pytestmark = pytest.mark.kills


@pytest.mark.limit(110)
def test_random_kills_lose_nothing_that_was_promised() -> None:
    """200 SIGKILLs and 200,000 messages, and everything that the contract says of them holds."""
    done = ran("-m", "tests.campaign", "--kills", "200", "--messages", "200000", "--part", "200")
    assert done.status == 0, done.err
    kills, put = (
        int(re.search(rf"([\d,]+) {what}", done.out)[1].replace(",", "")) for what in ("kills", "messages put")
    )
    assert kills >= 200
    assert put >= 200_000


@pytest.mark.limit(110)
def test_without_deaths_every_message_comes_exactly_once() -> None:
    """Six processes, three kinds of queue, nobody killed: nothing is missing, nothing counted as lost."""
    done = ran("-m", "tests.campaign", "--kills", "0", "--messages", "20000")
    assert done.status == 0, done.err
    put, got = re.search(r"([\d,]+) messages put, ([\d,]+) got, 0 missing, 0 counted", done.out).groups()
    assert put == got


@pytest.mark.limit(110)
def test_random_kills_of_unrelated_programs_lose_nothing_that_was_promised() -> None:
    """Programs at an endpoint that share nothing but its name, the binder killed as well as the others."""
    done = ran("-m", "tests.campaign", "--endpoints", "--kills", "12", "--messages", "8000")
    assert done.status == 0, done.err
    assert int(re.search(r"(\d+) kills", done.out)[1]) >= 12


@pytest.mark.parametrize(
    ("fate", "complaint"),
    [
        (Fate(10, 0, 0, killed=True, dead_consumers=0), None),
        (Fate(10, 1, 0, killed=True, dead_consumers=0), "missing"),
        (Fate(10, 4, 0, killed=True, dead_consumers=1), None),
        (Fate(10, 5, 0, killed=True, dead_consumers=1), "missing"),
        (Fate(10, 3, 2, killed=False, dead_consumers=1), None),
        (Fate(10, 4, 2, killed=False, dead_consumers=1), "missing"),
        (Fate(10, 1, 2, killed=False, dead_consumers=1), "missing"),
    ],
)
def test_the_judge_of_endpoints_finds_what_is_missing(fate: Fate, complaint: str | None) -> None:
    """More than was in flight towards the dead, more than was counted, or less than was counted: each is found."""
    if complaint is None:
        fate.check(3)
    else:
        with pytest.raises(AssertionError, match=complaint):
            fate.check(3)


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
