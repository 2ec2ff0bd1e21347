"""What `make bench` asks for, one by one: prints the requirements of the extra ``peers`` that are meant for this Python."""

from __future__ import annotations

from importlib.metadata import requires

from packaging.requirements import Requirement

__all__ = ["wanted"]


def wanted(declared: list[str]) -> list[str]:
    """Of all that the package declares, what the extra ``peers`` wants here, without the conditions."""
    found = []
    for one in map(Requirement, declared):
        if (
            one.marker is not None
            and one.marker.evaluate({"extra": "peers"})
            and not one.marker.evaluate({"extra": ""})
        ):
            found.append(f"{one.name}{one.specifier}")
    return found


if __name__ == "__main__":
    print("\n".join(wanted(requires("tensorpipe-ipc") or [])))
