"""What arrives, sorted to whoever waits for it."""

from __future__ import annotations

import numpy as np

from refit_protocol.messages import Generate, ReplyHeader, TokenDelta, TokensGenerated, VersionRun
from refit_trainer.errors import RefitdError
from refit_trainer.inbox import Arrival, Generation, Inbox


class Taken:
    def __init__(self) -> None:
        self.arrived: list[Arrival] = []

    def put(self, arrival: Arrival) -> None:
        self.arrived.append(arrival)


def send(inbox: Inbox, request: int, position: int, tokens: list[int], *, last: bool = False) -> None:
    delta = TokenDelta(
        request=request,
        prompt=0,
        output=0,
        position=position,
        count=len(tokens),
        versions=[VersionRun(1, len(tokens))],
        finish_reason="length" if last else None,
    )
    blobs = [np.array(tokens, "<i4").tobytes(), np.zeros(len(tokens), "<f4").tobytes()]
    inbox.deliver(ReplyHeader(id=0, body=TokensGenerated(deltas=[delta]), last=False), blobs)


def test_an_end_that_comes_again_is_not_handed_on() -> None:
    """After a reconnect the daemon says again that an output has ended; its consumer has heard it."""
    inbox, taken = Inbox(), Taken()
    request = inbox.expect_generation(Generation(Generate(), [], taken))
    send(inbox, request, 0, [5, 6])
    send(inbox, request, 2, [7], last=True)
    send(inbox, request, 3, [], last=True)
    assert [delta.token_ids.tolist() for (delta,) in taken.arrived] == [[5, 6], [7]]


def test_tokens_that_are_missing_fail_their_generation() -> None:
    """A gap is the daemon's fault and is not passed over."""
    inbox, taken = Inbox(), Taken()
    request = inbox.expect_generation(Generation(Generate(), [], taken))
    send(inbox, request, 1, [5])
    (error,) = taken.arrived
    assert isinstance(error, RefitdError)
    assert "came after 0" in error.message
