"""A packet that a line between two hosts loses is sent again, also that with the last word of an end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import children
import networks
import pytest
from children import Child, wait_until
from networks import Host, two_hosts
from secured import binders, connectors, make_keys

import tensorpipe_ipc as tp

pytestmark = pytest.mark.skipif(bool(networks.WHY_NOT), reason=f"two networks cannot be had: {networks.WHY_NOT}")

HEARTBEATS = 200  # bytes of one, at least, and whatever else


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    """Two of them."""
    with two_hosts() as both:
        yield both


def open_end(ends: children.Ends, role: str, endpoint: str, keys: Path, *, bind: bool) -> None:
    """Open the child's producer, or its consumer."""
    security = binders(keys) if bind else connectors(keys)
    open_it = children.open_producer if role == "producer" else children.open_consumer
    open_it(ends, endpoint, bind=bind, security=security)


@pytest.mark.parametrize("binds", [True, False], ids=["binder", "connector"])
@pytest.mark.parametrize("role", ["producer", "consumer"])
def test_a_goodbye_that_was_lost_on_its_way(hosts: tuple[Host, Host], role: str, binds: bool, tmp_path: Path) -> None:
    """It is sent again, though something comes to the end that has closed meanwhile."""
    near, far = hosts
    endpoint, keys = f"tcp://{(near if binds else far).address}:7411", make_keys(tmp_path)
    other = "consumer" if role == "producer" else "producer"
    with Child() as leaving, Child() as staying:
        puts, takes = (leaving, staying) if role == "producer" else (staying, leaving)
        leaving.call(networks.enter, near.path)
        staying.call(networks.enter, far.path)
        leaving.call(children.move_out_of_sight, str(tmp_path))
        leaving.call(open_end, role, endpoint, keys, bind=binds)
        staying.call(open_end, other, endpoint, keys, bind=not binds)
        puts.begin(children.put, 1)
        assert takes.call(children.take) == [1]
        puts.result()
        near.lose(far)
        leaving.begin(children.close)
        wait_until(near.unacknowledged)
        before = near.received()
        wait_until(lambda: near.received() > before + HEARTBEATS)
        near.find(far)
        leaving.result()
        if role == "producer":
            with pytest.raises(tp.EndOfStream):
                staying.call(children.take)
        else:
            wait_until(lambda: not staying.call(children.producer_statistics).peers)
            assert staying.call(children.producer_statistics).lost == 0
