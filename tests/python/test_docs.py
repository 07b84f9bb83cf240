"""The documents: their programs run, their commands and names exist, and the site has every page and no broken link."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import ncclx_rs
import pytest
import torch
from harness import BACKEND, World
from ncclx_rs import _api
from ncclx_rs.__main__ import parser
from ncclx_rs._load import native
from test_examples import runs_a_program
from test_rendezvous import free_port

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "packaging"))
import docs_pages  # noqa: E402  # packaging/ is no package
import pictures  # noqa: E402
import ratios  # noqa: E402
import screenshots  # noqa: E402

pytestmark = pytest.mark.skipif(BACKEND != "ncclx_rs", reason="the documents are those of ncclx_rs")

DOCUMENTS = {file.as_posix(): (ROOT / file).read_text() for file in docs_pages.documents(ROOT)}


def blocks(language: str) -> list[tuple[str, str]]:
    """Each block of code in a language, with the name of its document."""
    fence = re.compile(rf"^```{language}\n(.*?)^```", re.MULTILINE | re.DOTALL)
    return [(document, code) for document, text in DOCUMENTS.items() for code in fence.findall(text)]


# A program names in its first line the command that runs it: only the number of its ranks counts here.
COMMAND = re.compile(r"# (?:torchrun|python)\b(?:.*--nproc-per-node (\d+))?.* (\w+\.py)\n")
PROGRAMS = {
    f"{document}:{found[2]}": (int(found[1] or 0), code)
    for document, code in blocks("python")
    if (found := COMMAND.match(code))
}


def test_python_in_documents_compiles() -> None:
    found = blocks("python")
    assert len(found) > 15
    for document, code in found:
        compile(code, document, "exec")


def printed_by(code: str, ranks: int, folder: Path) -> list[str]:
    script = folder / "program.py"
    script.write_text(code)
    world = World(max(ranks, 1), "shm")
    try:
        return world.run(runs_a_program, str(script), free_port() if ranks else None, join=False)
    finally:
        world.close()


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_of_a_document_runs(program: str, tmp_path: Path) -> None:
    ranks, code = PROGRAMS[program]
    printed = printed_by(code, ranks, tmp_path)
    assert all(printed) and len(printed) == max(ranks, 1), printed
    if program.endswith("first.py"):
        sums = {0: "1.0, 1.0, 1.0, 1.0", 2: "3., 3., 3., 3."}
        assert all(sums[ranks] in text for text in printed), printed


def test_the_first_program_runs_on_two_ranks_as_well(tmp_path: Path) -> None:
    ranks, code = PROGRAMS["docs/start.md:first.py"]
    assert ranks == 0
    printed = printed_by(code, 2, tmp_path)
    assert printed == [f"rank {rank} of 2: [3.0, 3.0, 3.0, 3.0]\n" for rank in range(2)]


def test_the_commands_of_documents_are_accepted() -> None:
    found = 0
    for document, code in blocks("sh"):
        for line in code.replace("\\\n", " ").splitlines():
            words = shlex.split(line.partition(" | ")[0], comments=True)
            if not words or words[0] != "ncclx-rs":
                continue
            found += 1
            try:
                parser(words[1])[0].parse_args(words[1:])
            except SystemExit as end:
                assert end.code == 0, f"{document}: {line}"
    assert found > 5


def test_the_names_in_the_guide_to_moving_exist() -> None:
    text = DOCUMENTS["docs/migration.md"]
    methods = set(re.findall(r"`comm\.(\w+)`", text))
    assert len(methods) > 15
    whole = text[text.index("## From torchcomms") :]
    table = re.findall(r"^\| (`.*?) \| (?:the same|always)", whole, re.MULTILINE)
    methods |= {name for row in table for name in re.findall(r"`([a-z]\w*)[`(]", row)}
    homes = [ncclx_rs.TorchComm, ncclx_rs.TorchCommWindow, ncclx_rs.TorchWork, ncclx_rs, torch.ops.torchcomms]
    missing = [name for name in sorted(methods) if not any(hasattr(home, name) for home in homes)]
    assert not missing


def test_the_variables_in_documents_exist() -> None:
    known = {variable for _, variables, *_ in native().settings() for variable in variables}
    known |= set(re.findall(r"`(NCCLX_RS_\w+)", DOCUMENTS["docs/configuration.md"]))
    known |= {"NCCLX_RS_BACKEND_LIB_PATH_"}
    # What builds and tests read is in the documents for those who take part.
    for document in ("README.md", "docs/start.md", "docs/faq.md", "docs/migration.md", "docs/troubleshooting.md"):
        unknown = set(re.findall(r"\bNCCLX_RS_\w+", DOCUMENTS[document])) - known
        assert not unknown, document


def test_the_site_has_every_page_and_every_name() -> None:
    pages = docs_pages.Pages.of(ROOT)
    assert not pages.broken
    navigation = (ROOT / "mkdocs.yml").read_text()
    missing = [page for page in pages.texts if not page.startswith("source/") and f": {page}\n" not in navigation]
    assert not missing
    (build,) = re.findall(r"bin/mkdocs build.*", (ROOT / "Makefile").read_text())
    assert "--quiet" not in build, "mkdocs would drop its warnings, which are to fail the build"
    names = [name for name in _api.__all__ if not name.startswith("_") and not name.endswith("HookArgs")]
    assert not docs_pages.missing_names(pages.texts["reference.md"], names)
    assert docs_pages.missing_names("::: ncclx_rs.dump\n", ["dump", "new_comm"]) == ["new_comm"]
    assert "def " in pages.texts["source/examples/strategies/ddp.py.md"]
    assert "(../algorithms.md)" in pages.texts["tutorials/fsdp2_two_machines.md"]


def test_links_of_documents_become_links_of_pages(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "code").mkdir()
    (tmp_path / "code/a.py").write_text("'```'\n")
    (tmp_path / "docs/a.md").write_text(
        "[x](../README.md#top) [y](../code) [z](https://e.org/a)\n```\n[b](no.md)\n```\n"
    )
    (tmp_path / "README.md").write_text("[x](docs/a.md) [gone](docs/b.md)\n")
    pages = docs_pages.Pages.of(tmp_path)
    assert pages.broken == ["README.md: no such file: docs/b.md"]
    assert pages.texts["index.md"].startswith("[x](a.md) ")
    assert pages.texts["a.md"].splitlines()[0] == "[x](index.md#top) [y](source/code/index.md) [z](https://e.org/a)"
    assert "[b](no.md)" in pages.texts["a.md"], "code stays as it is"
    assert pages.texts["source/code/index.md"].endswith("- [`a.py`](a.py.md)\n")
    assert pages.texts["source/code/a.py.md"].endswith("# code/a.py\n\n````python\n'```'\n````\n")


def test_broken_links_of_a_site_are_found(tmp_path: Path) -> None:
    site = tmp_path.resolve()
    (site / "sub").mkdir()
    (site / "a.html").write_text(
        '<a href="sub/#here">x</a><a href="#gone">y</a><img src="no.png"><a href="https://e.org">'
    )
    (site / "sub/index.html").write_text('<p id="here"><a href="../a.html#there">z</a><a href="/a.html">')
    broken = docs_pages.broken_links(site, [site / "a.html", site / "sub/index.html"])
    assert broken == ["a.html: no anchor #gone", "a.html: no file no.png", "sub/index.html: no anchor ../a.html#there"]


# Stands for a browser: it writes an empty picture, and says a width.
BROWSER = """#!/bin/sh
for word; do
    case $word in --screenshot=*) : > "${word#--screenshot=}" ;; esac
done
echo "<title>width WIDTH</title>"
"""


def test_pages_are_photographed_and_not_wider_than_their_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site, out, browser = tmp_path / "site", tmp_path / "out", tmp_path / "browser"
    site.mkdir()
    (site / "a.html").write_text("<p>x")
    arguments = ["a.html", "--site", str(site), "--out", str(out)]
    monkeypatch.setenv("CHROME", str(browser))
    for width, code, said in ((400, 0, ""), (401, 1, "a.html: 401 pixels wide in a window of 400\n")):
        browser.write_text(BROWSER.replace("WIDTH", str(width)))
        browser.chmod(0o700)
        assert screenshots.main(arguments) == code
        assert capsys.readouterr().err == said
    assert sorted(picture.name for picture in out.iterdir()) == [
        f"a-{window}-{scheme}.png" for window in ("narrow", "wide") for scheme in ("dark", "light")
    ]
    assert screenshots.main(["b.html", *arguments[1:]]) == 1
    assert "b.html: there is no such page" in capsys.readouterr().err
    pages = docs_pages.Pages.of(ROOT).texts
    assert all(page.replace(".html", ".md") in pages for page in screenshots.PAGES)


def test_the_picture_of_the_read_me_has_the_figures_of_today() -> None:
    drawn = ratios.picture(*ratios.table(DOCUMENTS["docs/performance.md"]))
    assert (ROOT / "docs/ratios.svg").read_text() == drawn, "the picture is stale: run packaging/ratios.py"
    told = ratios.described(*ratios.table(DOCUMENTS["docs/performance.md"]))
    assert f"![{told}](docs/ratios.svg)" in DOCUMENTS["README.md"]


def test_the_pictures_of_the_design_are_those_that_are_drawn() -> None:
    for file, draw in pictures.PICTURES.items():
        drawn = draw()
        assert (ROOT / file).read_text() == drawn.svg(), f"{file} is stale: run packaging/pictures.py"
        assert f"![{drawn.title}]({Path(file).name})" in DOCUMENTS["docs/design.md"]
    named = set(re.findall(r"\b(?:algo|comm|engine|transport)/[a-z_/]*(?:\.rs)?|\bwork\.rs", pictures.call().svg()))
    assert len(named) > 5 and all((ROOT / "src" / name).exists() for name in named), named
