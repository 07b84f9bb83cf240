"""Photographs the main pages of the documentation's site in a headless browser: wide and narrow, light and dark.

python packaging/screenshots.py [--site target/docs/site] [--out target/docs/screenshots] [PAGE ...]

A page that is wider than the window is an error: nobody should have to scroll sideways. The browser is Chromium or
Chrome on the PATH, or what CHROME names.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The pages that a newcomer sees first, and those with pictures and wide tables.
PAGES = (
    "index.html",
    "start.html",
    "support.html",
    "reference.html",
    "tools.html",
    "performance.html",
    "design.html",
    "troubleshooting.html",
    "tutorials/fsdp2_two_machines.html",
)
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# Width and height in pixels.
WINDOWS = {"wide": (1280, 1600), "narrow": (400, 1600)}
# What the browser says when a page asks which colours its reader prefers.
SCHEMES = {"light": "1", "dark": "0"}
# Shows a page in a frame of a width, and says how wide the page is: a window itself has a least width.
FRAME = """<!doctype html><body style="margin:0">
<iframe id="f" width="{width}" height="{height}" src="{page}" style="border:0"></iframe><script>
document.getElementById("f").onload = () => setTimeout(() => {{
    document.title = "width " + document.getElementById("f").contentDocument.documentElement.scrollWidth;
}}, 500);
</script></body>"""
LIMIT = 120


def browser() -> str | None:
    """The browser, if there is one."""
    return os.environ.get("CHROME") or next(filter(None, map(shutil.which, BROWSERS)), None)


class _Handler(SimpleHTTPRequestHandler):
    """Serves the site, and at /frame/WIDTH/HEIGHT/PAGE a page in a frame."""

    def do_GET(self) -> None:
        found = re.fullmatch(r"/frame/(\d+)/(\d+)/(.+)", self.path)
        if not found:
            return super().do_GET()
        text = FRAME.format(width=found[1], height=found[2], page=f"/{found[3]}").encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
        return None

    def log_message(self, *_: object) -> None:
        """Prints nothing."""


@contextmanager
def served(site: Path) -> Iterator[str]:
    """Serves a folder to this host; gives its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Handler, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def run(program: str, scheme: str, *options: str) -> str:
    """Runs the browser; returns what it prints."""
    with tempfile.TemporaryDirectory(prefix="screenshots-") as profile:
        command = (
            program,
            "--headless=new",
            "--no-sandbox",  # as root it has none; all pages are our own
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={profile}",
            f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
            "--virtual-time-budget=10000",
            *options,
        )
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=True)
    return done.stdout


def main(arguments: Sequence[str] | None = None) -> int:
    """Photographs the pages; returns 1 if one is missing or too wide."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("pages", nargs="*", default=PAGES, metavar="PAGE", help="pages of the site; the main ones")
    parser.add_argument("--site", type=Path, default=ROOT / "target/docs/site", help="the folder of the site")
    parser.add_argument("--out", type=Path, default=ROOT / "target/docs/screenshots", help="the folder of the pictures")
    options = parser.parse_args(arguments)
    program = browser()
    if program is None:
        parser.error(f"there is no browser: expected one of {', '.join(BROWSERS)} on the PATH, or its path in CHROME")
    options.out.mkdir(parents=True, exist_ok=True)
    wrong = [
        f"{page}: there is no such page in {options.site}"
        for page in options.pages
        if not (options.site / page).is_file()
    ]
    with served(options.site) as address:
        for page in options.pages if not wrong else ():
            for window, (width, height) in WINDOWS.items():
                framed = f"{address}/frame/{width}/{height}/{page}"
                for scheme in SCHEMES:
                    picture = options.out / f"{page.removesuffix('.html').replace('/', '-')}-{window}-{scheme}.png"
                    size = f"--window-size={max(width, 500)},{height}"
                    run(program, scheme, size, f"--screenshot={picture}", framed)
                    if not picture.is_file():
                        wrong.append(f"{picture}: the browser has not written it")
                said = re.search(r"<title>width (\d+)</title>", run(program, "light", "--dump-dom", framed))
                if said is None:
                    wrong.append(f"{page}: the browser does not say how wide it is")
                elif int(said[1]) > width:
                    wrong.append(f"{page}: {said[1]} pixels wide in a window of {width}")
    for sentence in wrong:
        print(sentence, file=sys.stderr)
    print(f"{len(list(options.out.glob('*.png')))} pictures in {options.out}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
