"""The demo's input: the photographs and digits that scikit-learn ships, or a folder of the user's own pictures."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from tensorpipe_ipc.cli.failure import Failure

__all__ = ["Picture", "decode", "in_folder", "shipped"]

LONGEST = 1024  # pixels: a larger picture is scaled down, for its result has 12 bytes a pixel


class Picture(NamedTuple):
    """A picture to decode."""

    kind: str  # "photograph", "digit" or "image"
    source: str  # a photograph's file name, a digit's number, an image's path


def shipped() -> list[Picture]:
    """Return the pictures that scikit-learn ships: its two photographs in turn with a hundred of its digits."""
    photographs = itertools.cycle(("china.jpg", "flower.jpg"))
    digits = range(100)
    return [
        picture
        for photograph, digit in zip(photographs, digits, strict=False)
        for picture in (Picture("photograph", photograph), Picture("digit", str(digit)))
    ]


def in_folder(folder: str, most: int) -> tuple[list[Picture], list[str]]:
    """The pictures of a folder, by name, and its files that are none, each with the reason.

    Args:
        folder: its path; folders in it are not looked into.
        most: look no further when so many were found.

    Raises:
        Failure: there is no such folder, or no picture in it.
    """
    if not Path(folder).is_dir():
        raise Failure(f"--images {folder}: there is no such folder")
    found: list[Picture] = []
    skipped: list[str] = []
    for path in sorted(path for path in Path(folder).iterdir() if path.is_file()):
        picture = Picture("image", str(path))
        try:
            decode(picture)
            found.append(picture)
        except _unreadable() as error:
            skipped.append(f"{path.name}: {str(error).replace(str(path), path.name)}")
        if len(found) == most:
            break
    if not found:
        what = f"; not readable as one: {'; '.join(skipped)}" if skipped else ", it is empty"
        raise Failure(f"--images {folder}: there is no picture in it{what}")
    return found, skipped


def decode(picture: Picture) -> torch.Tensor:
    """A picture as it is sent: uint8, channels x height x width, RGB."""
    if picture.kind == "digit":
        grey = torch.from_numpy(_digits()[int(picture.source)] * 15).to(torch.uint8)  # from levels of 0 to 16
        return grey.expand(3, -1, -1).contiguous()
    return _decode_file(_photographs()[picture.source] if picture.kind == "photograph" else picture.source)


def _decode_file(path: str) -> torch.Tensor:
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        with Image.open(path) as file:
            image = file.convert("RGB")
    image.thumbnail((LONGEST, LONGEST))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def _unreadable() -> tuple[type[Exception], ...]:
    """Everything that Pillow raises at what is no picture, or only half of one."""
    from PIL import Image

    return (OSError, SyntaxError, ValueError, Image.DecompressionBombError, Image.DecompressionBombWarning)


@functools.cache
def _photographs() -> dict[str, str]:
    """The photographs' paths by name."""
    from sklearn.datasets import load_sample_images

    return {Path(path).name: path for path in _strings(load_sample_images().filenames)}


def _strings(values: object) -> Iterator[str]:
    assert isinstance(values, list)
    return map(str, values)


@functools.cache
def _digits() -> np.ndarray[tuple[int, int, int], np.dtype[np.float64]]:
    from sklearn.datasets import load_digits

    images: np.ndarray[tuple[int, int, int], np.dtype[np.float64]] = load_digits().images
    return images
