"""The pictures of docs/design.md: the way of a call, and how a message travels.

python packaging/pictures.py    # writes docs/*.svg
"""

from __future__ import annotations

from html import escape

from ratios import COLOURS, GREY, ROOT

BLUE, ORANGE = COLOURS
# Behind white text.
DEEP = {BLUE: "#22679f", ORANGE: "#a85d14", GREY: "#5d6670"}
WIDTH, ROW = 760, 82


class Picture:
    """An SVG picture that grows piece by piece. Its text is white on deep colours or grey, for light and dark pages."""

    def __init__(self, title: str, height: int) -> None:
        """An empty picture; the title says what it shows, for who does not see it."""
        self.title = title
        heads = (
            f'<marker id="head{colour.removeprefix("#")}" viewBox="0 0 8 8" refX="7" refY="4" '
            'markerWidth="9" markerHeight="9" '
            f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0L8 4L0 8z" fill="{colour}"/></marker>'
            for colour in (BLUE, ORANGE, GREY)
        )
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
            f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="13">',
            f"<title>{escape(title)}</title>",
            f"<defs>{''.join(heads)}</defs>",
        ]

    def text(self, x: int, y: int, words: str, anchor: str = "middle", colour: str = GREY, more: str = "") -> None:
        """One line of text, with its middle, its start or its end at ``x``."""
        self.parts.append(f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{colour}"{more}>{escape(words)}</text>')

    def lines(self, x: int, middle: int, anchor: str, *lines: str) -> None:
        """Lines of text, around a height."""
        for number, line in enumerate(lines):
            self.text(x, middle + 4 - 9 * (len(lines) - 1) + 18 * number, line, anchor)

    def box(self, x: int, y: int, width: int, colour: str, *lines: str) -> None:
        """A box, whose first line is its name."""
        height = 18 * len(lines) + 14
        self.parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{DEEP[colour]}"/>')
        for number, line in enumerate(lines):
            more = ' font-weight="bold"' if number == 0 else ""
            self.text(x + width // 2, y + 20 + 18 * number, line, colour="#ffffff", more=more)

    def arrow(self, path: str, colour: str = GREY, width: float = 1.5) -> None:
        """A line along a path of SVG, with a head at its end."""
        head = f'marker-end="url(#head{colour.removeprefix("#")})"'
        self.parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width:g}" {head}/>')

    def svg(self) -> str:
        """The picture as a file's text."""
        return "\n".join([*self.parts, "</svg>"]) + "\n"


def call() -> Picture:
    """From a call to its result, from above to below; on the left who does it, on the right where else it leads."""
    drawn = Picture(
        "The life of a call. PyTorch's c10d or a Rust program hands an Op to the Communicator, which checks it. The "
        "plan is this rank's schedule. The engine takes its steps: frames on streams to other ranks, by shared memory "
        "or TCP. Completions end steps, and the last step ends the Work, which has the result.",
        6 * ROW - 16,
    )
    left, right, middle, beside = 190, 570, 380, 612
    y = [8 + ROW * row for row in range(6)]
    drawn.box(left, y[0], 180, BLUE, "PyTorch program", "Backend: torch_plugin")
    drawn.box(right - 180, y[0], 180, BLUE, "Rust program", "comm/blocking.rs")
    drawn.arrow(f"M280 {y[0] + 50}V{y[1] - 2}")
    drawn.arrow(f"M480 {y[0] + 50}V{y[1] - 2}")
    drawn.text(middle, y[0] + 70, "Op")
    floors = (
        ("Communicator", "checks the call: comm/check.rs"),
        ("Plan", "algorithm and schedule: algo/select.rs, engine/plan.rs"),
        ("Engine", "takes steps whose predecessors are done: engine/"),
        ("Streams", "one a direction: transport/shm, transport/tcp"),
        ("Work", "result, then callbacks: work.rs, engine/callbacks.rs"),
    )
    for top, lines in zip(y[1:], floors, strict=True):
        drawn.box(left, top, right - left, BLUE, *lines)
    for row, gives in ((1, "an Op that is right"), (2, "sends, receives, copies, reductions"), (3, "frames")):
        x = middle if row < 3 else 280
        drawn.arrow(f"M{x} {y[row] + 50}V{y[row + 1] - 2}")
        drawn.text(x + 10, y[row] + 70, gives, "start")
    drawn.arrow(f"M480 {y[4]}V{y[3] + 52}")
    drawn.text(470, y[3] + 70, "completions", "end")
    drawn.arrow(f"M{left} {y[3] + 25}H{left - 14}V{y[5] + 25}H{left - 2}")
    drawn.text(left + 10, y[4] + 70, "the last step is done", "start")
    exits = ((1, ("a mistake:", "an error at once")), (2, ("CUDA tensors:", "a program for", "a stream")))
    for row, words in exits:
        drawn.arrow(f"M{right} {y[row] + 25}H{beside - 2}")
        drawn.lines(beside + 4, y[row] + 25, "start", *words)
    drawn.box(beside, y[4], WIDTH - beside - 8, ORANGE, "Other ranks", "their streams")
    drawn.arrow(f"M{right} {y[4] + 18}H{beside - 2}", ORANGE)
    drawn.arrow(f"M{beside} {y[4] + 34}H{right + 2}", ORANGE)
    threads = (
        (1, 2, "the calling", "thread"),
        (3, 4, "whichever thread", "makes progress"),
        (5, 5, "a waiting thread, or", "one for callbacks"),
    )
    for first, last, above, below in threads:
        drawn.parts.append(f'<path d="M152 {y[first]}V{y[last] + 50}" stroke="{GREY}" stroke-width="1.5"/>')
        drawn.lines(144, (y[first] + y[last] + 50) // 2, "end", above, below)
    return drawn


def message() -> Picture:
    """The three ways of a message, side by side; time goes down."""
    drawn = Picture(
        "Three ways of a message. Eager: the sender sends it in one frame, and the receiver keeps it until its "
        "receive is posted. Rendezvous: the sender sends an RTS, the receiver answers with an RTR once it has a "
        "buffer, and the message travels there in fragments. Single copy: the RTS says where the message lies, and "
        "the receiver reads it in the sender's memory and answers with an ATS.",
        282,
    )
    # For each way the arrows between the ranks: the words, which way, and whether the message itself moves.
    ways: tuple[tuple[str, str, tuple[tuple[str, str, str], ...], str], ...] = (
        ("Eager", "a short message", (("payload", ">", BLUE),), "kept until there is a receive"),
        (
            "Rendezvous",
            "a longer one",
            (
                ("RTS", ">", GREY),
                ("RTR: there is a buffer", "<", GREY),
                ("fragment", ">", BLUE),
                ("fragment", ">", BLUE),
            ),
            "written into that buffer",
        ),
        (
            "Single copy",
            "a long one within a host",
            (("RTS: where it lies", ">", GREY), ("process_vm_readv", ">", BLUE), ("ATS: it is read", "<", GREY)),
            "one copy, made by the receiver",
        ),
    )
    for number, (name, when, arrows, note) in enumerate(ways):
        start = 8 + (WIDTH + 12) // 3 * number
        sender, receiver, middle = start + 36, start + 196, start + 116
        drawn.text(middle, 20, name, more=' font-weight="bold"')
        drawn.text(middle, 38, when)
        for x, who in ((sender, "sender"), (receiver, "receiver")):
            drawn.box(x - 36, 50, 72, BLUE if x == sender else ORANGE, who)
            drawn.parts.append(f'<path d="M{x} 82V246" stroke="{GREY}" stroke-dasharray="3 3"/>')
        for row, (words, way, colour) in enumerate(arrows):
            y = 116 + 38 * row
            ends = (sender, receiver - 2) if way == ">" else (receiver, sender + 2)
            drawn.text(middle, y - 7, words)
            drawn.arrow(f"M{ends[0]} {y}H{ends[1]}", colour, 3 if colour == BLUE else 1.5)
        drawn.text(middle, 268, note)
    return drawn


PICTURES = {"docs/call.svg": call, "docs/message.svg": message}


if __name__ == "__main__":
    for file, draw in PICTURES.items():
        (ROOT / file).write_text(draw().svg())
