"""Finds TCP connections that are much worse than the communicator's others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ncclx_rs.diagnose.dumps import Communicator, Link

# A connection that carried less has no meaningful rate or loss.
_ENOUGH_BYTES = 1 << 20
_ENOUGH_SEGMENTS = 100
# Fewer connections do not show what is usual.
_ENOUGH_LINKS = 3

_TIMES_WORSE = 4


@dataclass(frozen=True)
class SlowLink:
    """A connection that is much worse than the others.

    Attributes:
        sender: the rank that sends on it.
        receiver: the rank that it sends to.
        worse: by which factor it is worse than the best quarter of the connections.
        text: its values, and the least that the best quarter reaches.
    """

    sender: int
    receiver: int
    worse: float
    text: str


@dataclass(frozen=True)
class _Measure:
    """A property of connections; less is better.

    Attributes:
        of: the property's value; None if the connection has carried too little to tell.
        margin: a difference from the usual value that is never reported.
        text: the value and the usual one in words.
    """

    of: Callable[[Link], float | None]
    margin: float
    text: Callable[[float, float], str]


_MEASURES = (
    _Measure(
        lambda link: link.sending / link.bytes if link.bytes >= _ENOUGH_BYTES and link.sending else None,
        0,
        lambda mine, usual: f"{1 / mine:.3g} MB/s, others {1 / usual:.3g} MB/s",
    ),
    _Measure(
        lambda link: link.round_trip / 1e3,
        1,
        lambda mine, usual: f"a round trip of {mine:.1f} ms, others {usual:.1f} ms",
    ),
    _Measure(
        lambda link: link.resent / link.segments if link.segments >= _ENOUGH_SEGMENTS else None,
        0.01,
        lambda mine, usual: f"{100 * mine:.1f} % sent again, others {100 * usual:.1f} %",
    ),
)


def slow_links(communicator: Communicator) -> list[SlowLink]:
    """The connections that are much slower than the others, or lose much more; the worst comes first."""
    links = {
        (dump.rank, peer.rank): peer.link
        for dump in communicator.dumps.values()
        for peer in dump.peers
        if peer.link is not None
    }
    complaints: dict[tuple[int, int], list[str]] = {}
    badness: dict[tuple[int, int], float] = {}
    for measure in _MEASURES:
        values = {pair: value for pair, link in links.items() if (value := measure.of(link)) is not None}
        if len(values) < _ENOUGH_LINKS:
            continue
        usual = sorted(values.values())[len(values) // 4]
        for pair, value in values.items():
            if value > max(_TIMES_WORSE * usual, usual + measure.margin):
                complaints.setdefault(pair, []).append(measure.text(value, usual))
                badness[pair] = max(badness.get(pair, 0), value / max(usual, measure.margin))
    worst_first = sorted(complaints, key=lambda pair: (-badness[pair], pair))
    return [SlowLink(*pair, badness[pair], "; ".join(complaints[pair])) for pair in worst_first]
