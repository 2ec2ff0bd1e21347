"""The documents' figures: all come from one file, between marks, and none stands in prose."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from programs import ran

from bench import figures
from bench.page import documents

MATPLOTLIB = re.compile(r"Matplotlib v[0-9.]+")
ROOT = Path(__file__).resolve().parents[2]
# A time, a rate or a multiple, as prose would tell it. Limits and promises are no figures.
FIGURE = re.compile(r"\d ?(?:µs|us|ms|[GM]B/s|×)|\d times as |\d % (?:faster|slower|more|less)")


def _figures() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / figures.FILE).read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("name", documents.DOCUMENTS)
def test_a_document_shows_what_the_file_says(name: str) -> None:
    """Rendered from the file once more, a document is as it was."""
    text = (ROOT / name).read_text(encoding="utf-8")
    assert documents.render(text, _figures()) == text


@pytest.mark.parametrize("name", documents.DOCUMENTS)
def test_no_figure_stands_in_prose(name: str) -> None:
    """Outside its marks a document tells no figure."""
    text = (ROOT / name).read_text(encoding="utf-8")
    for part in documents.parts_of(text):
        before, _, rest = text.partition(documents.begin_of(part))
        text = before + rest.partition(documents.end_of(part))[2]
    assert not FIGURE.findall(text)


def test_each_part_was_measured_by_one_command() -> None:
    """The file has each comparison of the command, with its own command line, and says where and when."""
    found = _figures()
    assert list(found["parts"]) == list(figures.PARTS)
    for part, (arguments, _) in figures.PARTS.items():
        assert found["parts"][part]["command"] == " ".join(["python -m bench", part, *arguments])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found["date"])
    assert {"processor", "cores", "system", "python", "torch"} <= set(found["machine"])
    assert found["parts"]["all"]["date"] == found["date"]


def test_the_documents_show_each_part() -> None:
    """Each comparison is shown, that of all peers too, and the pictures that the documents name are there."""
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in documents.DOCUMENTS]
    shown = [part for text in texts for part in documents.parts_of(text)]
    assert sorted(shown) == sorted(documents.SHOWN), "each stands in one place, between its marks"
    of_others = {source for source, _ in documents.details.DETAILS.values()}
    assert of_others | {"all"} == set(figures.PARTS)
    for peer in documents.tables.SHORT.values():
        assert f"| {peer} |" in texts[0].replace("**", ""), "five of the comparison of all stand in the README"
    for name in re.findall(r"benchmarks/([a-z-]+[.]svg)", "".join(texts)):
        assert (ROOT / documents.FOLDER / name).stat().st_size < 150_000


@pytest.mark.kills
@pytest.mark.limit(60)
def test_the_pictures_show_what_the_file_says(tmp_path: Path) -> None:
    """Drawn from the file once more, a picture is as it was. Another version of matplotlib draws it in other words."""
    code = (
        "import json, sys\n"
        "from pathlib import Path\n"
        "from bench import figures\n"
        "found = json.loads((figures.ROOT / figures.FILE).read_text())\n"
        "figures.documents._draw(found['parts']['all'], Path(sys.argv[1]))\n"
    )
    done = ran("-c", code, str(tmp_path))
    assert done.status == 0, done.err
    drawn = sorted(tmp_path.iterdir())
    assert len(drawn) == len(documents.PICTURES)
    for path in drawn:
        made, kept = (folder.joinpath(path.name).read_text() for folder in (tmp_path, ROOT / documents.FOLDER))
        if MATPLOTLIB.findall(made) == MATPLOTLIB.findall(kept):
            assert made == kept


def test_only_what_stands_between_the_marks_is_replaced() -> None:
    """The text around the marks stays as it is, whatever stood between them."""
    begin, end = documents.begin_of("tcp"), documents.end_of("tcp")
    shown = documents.render(f"# before\n{begin}\nold\n{end}\nafter\n", _figures())
    assert shown.startswith(f"# before\n{begin}\n|")
    assert shown.endswith(f"`\n{end}\nafter\n")
    assert "old" not in shown
    assert documents.render(shown, _figures()) == shown


@pytest.mark.parametrize(
    ("text", "lacks"),
    [
        ("# no marks\n", "no line like"),
        (documents.begin_of("tcp"), "to here"),
        (documents.begin_of("tea") + documents.end_of("tea"), "is none of"),
    ],
)
def test_a_document_whose_marks_are_wrong_is_refused(text: str, lacks: str) -> None:
    """The error names the mark that is missing, or the part that is none."""
    with pytest.raises(ValueError, match=lacks):
        documents.render(text, _figures())


@pytest.mark.kills
@pytest.mark.limit(120)
def test_the_command_measures_and_renews(tmp_path: Path) -> None:
    """A run writes what each part found into the file, and passes it on to the documents."""
    code = (
        "import sys\n"
        "from bench import __main__ as command, figures\n"
        "figures.PARTS = {'tcp': (('--scale', '0.01'), 5)}\n"
        "figures.documents.renew = lambda found, root: print(sorted(found['parts']), (root / 'README.md').exists())\n"
        "command.main(['figures', '--file', sys.argv[1]])\n"
    )
    done = ran("-c", code, str(tmp_path / "figures.json"))
    assert done.status == 0, done.err
    assert done.out.splitlines()[-1] == "['tcp'] True"
    found = json.loads((tmp_path / "figures.json").read_text())
    assert found["parts"]["tcp"]["command"] == "python -m bench tcp --scale 0.01"
    assert found["parts"]["tcp"]["rows"]
