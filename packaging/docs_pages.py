"""The pages of the documentation site, from the Markdown of the repository. Pure but for reading files.

A document links to other files of the repository, wherever they lie. On the site a document is a page, and every other
file that a document links to is a page with its text.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# The documents that are pages beside those of docs/.
BESIDE = ("README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md", "tests/*/README.md")
# The folder of the pages of other files.
SOURCES = "source"
# How a fence names the language of a file.
LANGUAGES = {".py": "python", ".rs": "rust", ".toml": "toml", ".sh": "sh", ".cpp": "cpp", ".h": "cpp", ".json": "json"}

_FENCE = re.compile(r"^(```|~~~)")
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")


def documents(root: Path) -> list[Path]:
    """The documents that are pages, relative to the repository's root."""
    found = [*root.glob("docs/**/*.md"), *(file for pattern in BESIDE for file in root.glob(pattern))]
    return sorted(file.relative_to(root) for file in found)


def page_of(document: Path) -> str:
    """The page of a document: its place in the site's sources."""
    if document == Path("README.md"):
        return "index.md"
    return document.relative_to("docs").as_posix() if document.is_relative_to("docs") else document.as_posix()


@dataclass
class Pages:
    """The pages of a repository.

    Attributes:
        root: the repository's root.
        texts: for each page its Markdown, with links to pages alone.
        broken: a sentence for each link to a file that does not exist.
    """

    root: Path
    texts: dict[str, str] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, root: Path) -> Pages:
        """All pages of the repository at ``root``."""
        pages = cls(root)
        for document in documents(root):
            text = (root / document).read_text()
            pages.texts[page_of(document)] = linked(text, lambda target, of=document: pages._link(of, target))  # type: ignore[misc]
        return pages

    def _link(self, document: Path, target: str) -> str:
        """Where a link of a document leads on the site."""
        path, hash_sign, fragment = target.partition("#")
        if not path or urlsplit(target).scheme:
            return target
        file = Path(posixpath.normpath((document.parent / unquote(path)).as_posix()))
        if not (self.root / file).exists():
            self.broken.append(f"{document}: no such file: {target}")
            return target
        page = page_of(document)
        if file.suffix == ".svg":
            return posixpath.relpath(file.relative_to("docs").as_posix(), posixpath.dirname(page) or ".")
        found = page_of(file) if file in documents(self.root) else self._source(file)
        return posixpath.relpath(found, posixpath.dirname(page) or ".") + hash_sign + fragment

    def _source(self, file: Path) -> str:
        """The page of a file that is no document, or of a folder; made at its first use."""
        folder = (self.root / file).is_dir()
        page = f"{SOURCES}/{file.as_posix()}/index.md" if folder else f"{SOURCES}/{file.as_posix()}.md"
        if page not in self.texts:
            self.texts[page] = ""  # not again from below
            self.texts[page] = "---\nsearch:\n  exclude: true\n---\n" + (
                self._folder(file) if folder else source(file.as_posix(), (self.root / file).read_text())
            )
        return page

    def _folder(self, folder: Path) -> str:
        own = f"{SOURCES}/{folder.as_posix()}"
        files = (file for file in sorted((self.root / folder).rglob("*")) if file.suffix in LANGUAGES)
        lines = [f"# {folder.as_posix()}", ""]
        for file in files:
            relative = file.relative_to(self.root)
            page = posixpath.relpath(self._source(relative), own)
            lines.append(f"- [`{relative.relative_to(folder).as_posix()}`]({page})")
        return "\n".join(lines) + "\n"


def source(name: str, text: str) -> str:
    """A page with a file's text."""
    fence = "`" * max(3, 1 + max((len(ticks) for ticks in re.findall(r"`+", text)), default=0))
    return f"# {name}\n\n{fence}{LANGUAGES.get(Path(name).suffix, 'text')}\n{text.rstrip()}\n{fence}\n"


def linked(text: str, link: Callable[[str], str]) -> str:
    """A Markdown text in which ``link`` has replaced each link's target. Blocks of code stay as they are."""
    lines, in_code = [], False
    for line in text.split("\n"):
        if _FENCE.match(line):
            in_code = not in_code
        lines.append(line if in_code else _LINK.sub(lambda found: found[1] + link(found[2]) + found[3], line))
    return "\n".join(lines)


def missing_names(text: str, names: Iterable[str]) -> list[str]:
    """The names of the package that the page of the reference leaves out."""
    shown = set(re.findall(r"^::: ncclx_rs\.(\S+)$", text, re.MULTILINE))
    return [name for name in names if name not in shown]


class _Links(HTMLParser):
    """The links and the anchors of a page of HTML."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.targets.append(value)
            elif name in ("id", "name") and value:
                self.anchors.add(value)


def broken_links(site: Path, pages: Iterable[Path]) -> list[str]:
    """The links of pages of HTML that lead to no file or to no anchor of the site, or that load from elsewhere.

    Args:
        site: the folder of the site.
        pages: the pages whose links are looked at.
    """
    read: dict[Path, _Links] = {}

    def links_of(page: Path) -> _Links:
        if page not in read:
            read[page] = _Links()
            read[page].feed(page.read_text(errors="replace"))
        return read[page]

    broken = []
    for page in pages:
        for target in links_of(page).targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            file = (page.parent / unquote(parts.path)).resolve() if parts.path else page.resolve()
            if parts.path.startswith("/"):
                file = site / unquote(parts.path).lstrip("/")
            file = file / "index.html" if file.is_dir() else file
            if not file.is_file():
                broken.append(f"{page.relative_to(site)}: no file {target}")
            elif parts.fragment and file.suffix == ".html" and "/rust/" not in file.as_posix():
                if unquote(parts.fragment) not in links_of(file).anchors:
                    broken.append(f"{page.relative_to(site)}: no anchor {target}")
    return broken
