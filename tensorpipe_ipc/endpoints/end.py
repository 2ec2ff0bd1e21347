"""End: what a producer and a consumer have in common: their life, from the constructor to close, or the program's end."""

from __future__ import annotations

import time
import warnings
from types import TracebackType
from typing import NoReturn, TypeVar

from tensorpipe_ipc.endpoints.guard import Guard, close_at_last
from tensorpipe_ipc.endpoints.participant import Participant
from tensorpipe_ipc.endpoints.peer import Peer, lost_or_failed
from tensorpipe_ipc.sections import postponed, undisturbed
from tensorpipe_ipc.zeromq.zmq_contexts import run_beside_reaper

__all__ = ["End"]

_FAREWELL = 0.2  # seconds that a goodbye has to leave where close is cut short, whatever the linger
_Self = TypeVar("_Self", bound="End")


class End:
    """A producer's or a consumer's. All but its conversation, which is its ``Participant``'s."""

    def __init__(self, participant: Participant, linger: float = 0.0) -> None:
        """Open it. Where the program ends meanwhile, it is closed once it is open: so this is a use of it."""
        self._participant, self._linger = participant, linger
        self._guard = Guard(f"{type(self).__name__} on {participant.endpoint}")
        self._finish = close_at_last(self, self._guard, _close_and_warn, participant, self._guard, linger)
        with self._guard, undisturbed():
            participant.conversation.open()
        self._guard.what = f"{type(self).__name__} on {participant.endpoint}"  # with the port that was chosen

    @property
    def endpoint(self) -> str:
        """The address in full, with the port that was chosen if it was left open."""
        return self._participant.endpoint

    def trim(self) -> int:
        """Give back the memory that nobody needs now.

        It is what this end shares with its peers, whichever process has it, and what it keeps ready for frames.
        Memory that lies idle for some seconds is given back anyway, while either end puts or waits.

        Returns:
            How many bytes that were, but for what malloc kept.

        Raises:
            Closed: the end is closed or was forked.
            Busy: another thread uses it.
        """
        with self._guard:
            return self._participant.trim()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} on {self.endpoint}: an end belongs to the process that made it, and cannot be copied or "
            "pickled; pass the address, and make an end there"
        )

    def _close(self) -> tuple[str, list[Peer]]:
        """Close. Return what was not taken, in words, and by whom that left.

        In pyzmq's thread it goes on in another one, which warns of that. What is collected there may close, as generators do.
        """
        if run_beside_reaper(_close_at_last, self._participant, self._guard, self._linger):
            return "", []
        with self._guard.to_close() as is_open:
            told = _close(self._participant, self._guard, self._linger) if is_open else ("", [])
            self._finish.detach()
            return told

    def __enter__(self: _Self) -> _Self:
        """Itself.

        Raises:
            Closed: the end is closed or was forked.
        """
        with self._guard:
            return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if not self._guard.closing:  # else another thread closes it, and that is why the block is left
                self._participant.end_by(value)
        finally:
            told, peers = self._close()
        if told and value is None:
            raise lost_or_failed(told, peers)
        if told:
            warnings.warn(told, RuntimeWarning, stacklevel=2)


def _close_and_warn(participant: Participant, guard: Guard, linger: float) -> None:
    """Close what an end has, when that was dropped. It must not know the end itself."""
    work = _close_at_last, participant, guard, linger
    if not (postponed(*work) or run_beside_reaper(*work)):
        _close_at_last(participant, guard, linger)


def _close_at_last(participant: Participant, guard: Guard, linger: float) -> None:
    with guard.at_last() as is_open:
        told, _ = _close(participant, guard, linger) if is_open else ("", [])
    if told:
        warnings.warn(told, RuntimeWarning, stacklevel=2)


def _close(participant: Participant, guard: Guard, linger: float) -> tuple[str, list[Peer]]:
    """Close what an end has. May be cut short anywhere by an exception, and called again.

    Returns:
        What was not taken and nobody was told of, in words; and the consumers that left without having taken it.
    """
    guard.closing = True
    untaken, farewell = "", _FAREWELL
    try:
        if not participant.conversation.has_parted:
            guard.until = time.monotonic() + linger
            untaken, farewell = participant.take_leave(linger)
            guard.until = time.monotonic() + farewell
    finally:
        with undisturbed():
            participant.close(farewell)
    guard.set_closed()
    losses, peers = participant.told_losses()
    told = "; ".join(filter(None, [losses, untaken]))
    return f"{participant.endpoint}: {told}" if told else "", peers
