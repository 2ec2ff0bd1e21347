"""Find the ends that are attached to an endpoint, their transport, and its reason.

It looks up a process only by the end's own file: a peer may claim any process over the socket. Of such a one it asks no more
than if it lives.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from tensorpipe_ipc.cli.doctor.finding import Finding, State
from tensorpipe_ipc.endpoints import rendezvous_file
from tensorpipe_ipc.endpoints.published_status import Attached, PublishedStatus, published_statuses
from tensorpipe_ipc.process import Identity, identity, is_alive, open_ports, own_hosts
from tensorpipe_ipc.zeromq.address_claim import owner_of
from tensorpipe_ipc.zeromq.addresses import Address, check_socket_file, parse

__all__ = ["findings"]

_ALL_HOSTS = {"tcp://*", "tcp://0.0.0.0", "tcp://[::]"}


def findings(endpoint: str) -> Iterator[Finding]:
    """Yield findings from the published status of the endpoint's ends, and from the kernel's view of its socket.

    Raises:
        ValueError: not an endpoint, or one within a process.
        Refused: the address may not be used, or its file belongs to another user.
    """
    address = parse(endpoint, has_keys=not endpoint.startswith("inproc:"))
    if address.scheme == "inproc":
        raise ValueError(f"{endpoint}: inproc is within one process, and cannot be looked at from another")
    ends = [status for status in published_statuses() if _may_be_one(status.endpoint, address.text)]
    binders, own = [status for status in ends if status.binds], {status.identity for status in ends}
    connectors = [status for status in ends if not status.binds]
    if not binders:
        is_open = _is_open(address)
        peers = (peer for end in connectors for peer in end.peers)
        yield _unbound(address, next((peer for peer in peers if _may_bind(peer, is_open)), None), is_open)
    for binder in binders:
        yield Finding("bound by", State.OK, f"a {binder.role}, {_process(binder.identity)}{_file(address)}")
        if not binder.peers:
            yield Finding("attached", State.NOTE, "nobody")
        yield from (_attached(peer, own) for peer in binder.peers)
    known = {peer.identity for binder in binders for peer in binder.peers}
    yield from (_connected(end) for end in connectors if end.identity not in known)


def _may_be_one(text: str, other: str) -> bool:
    """Return whether two addresses may be the same: a binder of all of this host's has each of them."""
    (host, _, port), (other_host, _, other_port) = text.rpartition(":"), other.rpartition(":")
    hosts = {host, other_host}
    return text == other or (port == other_port and bool(hosts & _ALL_HOSTS) and all(map(_is_here, hosts)))


def _is_here(host: str) -> bool:
    name = host.removeprefix("tcp://").strip("[]")
    return host in _ALL_HOSTS or name.startswith("127.") or name in own_hosts()


def _is_open(address: Address) -> bool:
    """Return whether a process of this host, of whatever user, has a tcp port open for others, as the kernel says."""
    if address.scheme != "tcp" or not _is_here(address.text.rpartition(":")[0]):
        return False
    return any(
        address.text.endswith(f":{port}") if address.has_name else _may_be_one(_tcp(ip, port), address.text)
        for ip, port in open_ports()
    )


def _tcp(ip: str, port: int) -> str:
    ip = ip.removeprefix("::ffff:")  # of IPv4, at a socket of IPv6
    return f"tcp://[{ip}]:{port}" if ":" in ip else f"tcp://{ip}:{port}"


def _may_bind(peer: Attached, is_open: bool) -> bool:
    """Return whether a connector may be right about a binder that is not seen: it is elsewhere, or another user's."""
    return not peer.identity.same_namespace(identity()) or (is_open and is_alive(peer.identity))


def _unbound(address: Address, peer: Attached | None, is_open: bool) -> Finding:
    """Say what of a binder is known where its own status is not seen.

    Args:
        peer: what a connector that is attached to it says of it.
        is_open: whether the kernel knows of somebody.
    """
    if peer is not None:
        who = f"a {peer.role}, {peer.identity}, as a connector says"
        return Finding("bound by", State.OK, f"{who}; its status cannot be read from here: ask there")
    owner = owner_of(address.path) if address.path and check_socket_file(address.path) else None
    if owner is None and not is_open:
        return Finding("bound by", State.NO, f"nobody: no program has {address.text} open for others to connect to")
    who = "a process" if owner is None else f"pid {owner}" if owner > 0 else "a process that does not answer"
    return Finding(
        "bound by", State.NO, f"{who}, which is no end of ours, or in another container or user's: ask there"
    )


def _attached(peer: Attached, own: set[Identity]) -> Finding:
    process = _process(peer.identity) if peer.identity in own else str(peer.identity)
    return Finding(f"  {peer.role}", _state_of(peer), f"{process}: {peer.transport}")


def _state_of(peer: Attached) -> State:
    return State.OK if peer.transport == "shared memory" else State.NO if peer.wanted else State.NOTE


def _file(address: Address) -> str:
    found = rendezvous_file.read(address)
    return "" if found is None or not found.offers else "; its rendezvous file lets others in while it computes"


def _connected(end: PublishedStatus) -> Finding:
    for peer in end.peers:
        state = _state_of(peer)
        way = peer.transport if state is not State.OK else f"{peer.transport}, which the binder has not looked at yet"
        return Finding(f"  {end.role}", state, f"{_process(end.identity)}: {way}")
    why = end.refusal or "the binder has not let it in yet: it does so inside get, put and flush"
    return Finding(f"  {end.role}", State.NO if end.refusal else State.NOTE, f"{_process(end.identity)}, waits: {why}")


def _process(identity: Identity) -> str:
    state = "" if is_alive(identity) else ", dead"
    command = _command(identity.pid)
    return f"{identity}{f' ({command})' if command else ''}{state}"


def _command(pid: int) -> str:
    """Return the command of a process, without folders, for people."""
    try:
        with open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="replace") as file:
            words = file.read().split("\0")
    except OSError:
        return ""
    return " ".join(os.path.basename(word) for word in words[:2] if word)[:30]
