"""What mkdocs calls to make the site: mkdocs.yml names this file.

The documents outside of docs/ become pages, and links to other files of the repository lead to pages with their text.
A link to nothing, or a public name that the reference leaves out, is a warning, which ends a strict build.
"""

from __future__ import annotations

import ast
import logging
import os
import shutil
from pathlib import Path
from typing import Any

from docs_pages import Pages, broken_links, missing_names
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
# The folder of rustdoc's pages, which the site has at rust/.
RUSTDOC = "NCCLX_RS_RUSTDOC"

_log = logging.getLogger("mkdocs.hooks.ncclx_rs")


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that do not lie in docs/, and replaces the text of those that do."""
    pages = Pages.of(ROOT)
    for sentence in pages.broken:
        _log.warning("%s", sentence)
    for name in missing_names(pages.texts["reference.md"], public_names()):
        _log.warning("docs/reference.md leaves out ncclx_rs.%s", name)
    for page, text in pages.texts.items():
        old = files.get_file_from_path(page)
        if old is not None:
            files.remove(old)
        files.append(File.generated(config, page, content=text))
    return files


def public_names() -> list[str]:
    """The names of the object API, which the reference has to have; the arguments of hooks are one entry there."""
    tree = ast.parse((ROOT / "torch_plugin/python/ncclx_rs/_api.py").read_text())
    (names,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return [name for name in names if not name.startswith("_") and not name.endswith("HookArgs")]


def on_post_build(config: Any) -> None:
    """Puts rustdoc's pages into the site, and looks at all links of the pages that people write."""
    site = Path(config.site_dir).resolve()
    own = sorted(site.rglob("*.html"))
    if rustdoc := os.environ.get(RUSTDOC):
        shutil.copytree(rustdoc, site / "rust")
        if not (site / "rust/ncclx_rs/index.html").exists():
            _log.warning("%s has no pages of the crate", rustdoc)
    for sentence in broken_links(site, [page for page in own if page.name != "404.html"]):
        _log.warning("%s", sentence)
