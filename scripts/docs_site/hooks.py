# SPDX-License-Identifier: Apache-2.0
"""What MkDocs needs besides docs: pages that lie elsewhere, and links to what is no page.

A page links to files of the repository by relative paths, as GitHub reads them. Those of other
pages stay links within the site, wherever these lie; pictures come along; the rest are links to the
repository, if pyproject.toml names one, and else plain words.
"""

from __future__ import annotations

import os
import posixpath
import re
import sys
from pathlib import Path

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert.exporters import MarkdownExporter

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
#: Pages that are not in docs, and where they are in the site.
PAGES = {
    name: name.lower()
    for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
    if (ROOT / name).exists()
} | {
    f"notebooks/{path.name}": f"notebooks/{path.stem}.md"
    for path in sorted((ROOT / "notebooks").glob("*.ipynb"))
}
#: Where they come from, by their places in the site.
ORIGINS = {place: origin for origin, place in PAGES.items()}
#: Pages that say what another file of the repository says there.
SAME = {"README.md": "index.md"}
PICTURES = (".png", ".svg")
#: Where a page has the public headers of C++.
HEADERS = "<!-- headers -->"
# A link of Markdown, a definition of one, or an attribute of HTML; the second group is its target.
LINK = re.compile(r"""(\]\(|^\[[^\]]+\]:\s+|\b(?:href|src|srcset)=")([^)\s"]+)""", re.MULTILINE)
WHOLE_LINK = re.compile(r"(?<!!)\[([^\[\]]*)\]\(([^)\s]+)\)")


def repository() -> str | None:
    """Where the sources are published, if pyproject.toml says so."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    urls = {name.lower(): url for name, url in project.get("urls", {}).items()}
    return urls.get("repository") or urls.get("source")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    url = repository()
    if url:
        config.repo_url = url.removesuffix("/").removesuffix(".git")
        config.repo_name = "/".join(config.repo_url.split("/")[-2:])
        config.edit_uri = "edit/main/docs/"
    return config


def notebook(path: Path) -> tuple[str, dict[str, bytes]]:
    """A notebook with the results that it holds, as Markdown and its pictures."""
    exporter = MarkdownExporter()
    names = {"unique_key": path.stem, "output_files_dir": f"{path.stem}_files"}
    text, resources = exporter.from_notebook_node(nbformat.read(path, as_version=4), names)
    return text, resources["outputs"]


def first_sentence(header: Path) -> str:
    """Of the first comment on a declaration."""
    text = header.read_text(encoding="utf-8").partition("namespace cpattn")[2]
    comment = re.search(r"(?:^ *///.*\n)+", text, re.MULTILINE)
    words = " ".join(line.strip(" /") for line in comment[0].splitlines()) if comment else ""
    sentence = re.split(r"(?<=[a-z\])])[.:;] ", words)[0].rstrip(".:")
    return re.sub(r"([\[\]<>|*_])", r"\\\1", sentence)


def headers() -> str:
    """The public headers of C++, room by room, as their README and their first comments have it."""
    parts = []
    for readme in sorted((ROOT / "cpp" / "include" / "cpattn").glob("*/README.md")):
        folder = readme.parent
        said = readme.read_text(encoding="utf-8").split("\n\n", 1)[1]
        rows = [
            f"| [{header.name}](../../{header.relative_to(ROOT)}) | {first_sentence(header)} |"
            for header in sorted(folder.glob("*.h"))
        ]
        table = ["| Header | Its first declaration |", "|---|---|", *rows]
        parts += [f"## {folder.name}", said.rstrip("\n"), "\n".join(table)]
    return "\n\n".join(parts)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for origin, place in PAGES.items():
        path = ROOT / origin
        if path.suffix == ".ipynb":
            text, pictures = notebook(path)
            for name, content in pictures.items():
                files.append(File.generated(config, f"notebooks/{name}", content=content))
            files.append(File.generated(config, place, content=text))
        else:
            files.append(File.generated(config, place, content=path.read_text(encoding="utf-8")))
    return files


def origin_of(page: Page) -> str:
    """The path of what a page is made from, in the repository."""
    return ORIGINS.get(page.file.src_uri, f"docs/{page.file.src_uri}")


def place_of(path: str, files: Files, config: MkDocsConfig) -> str | None:
    """Where the site has a file of the repository; None if it has not."""
    place = SAME.get(path) or PAGES.get(path)
    if place is None and path.startswith("docs/"):
        place = path.removeprefix("docs/")
    if place is None and path.endswith(PICTURES):
        place = path
        if files.get_file_from_path(place) is None:
            files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    return place if place and files.get_file_from_path(place) else None


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    origin = origin_of(page)
    here = posixpath.dirname(page.file.src_uri)
    if config.repo_url:
        page.edit_url = f"{config.repo_url}/edit/main/{origin}"

    if HEADERS in markdown:  # on one page
        markdown = markdown.replace(HEADERS, headers())

    def target_of(target: str) -> str | None:
        """The target, as the site has it; None for a file of a repository that nobody published."""
        path, mark, anchor = target.partition("#")
        if not path or ":" in path or path.startswith("/"):
            return target
        in_repository = posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
        place = place_of(in_repository, files, config)
        if place is not None:
            return posixpath.relpath(place, here or ".") + mark + anchor
        if in_repository.startswith("docs/") or not os.path.exists(ROOT / in_repository):
            return target  # which MkDocs complains of
        if not config.repo_url:
            return None
        kind = "tree" if (ROOT / in_repository).is_dir() else "blob"
        return f"{config.repo_url}/{kind}/main/{in_repository}{mark}{anchor}"

    def whole(match: re.Match[str]) -> str:
        return match[0] if target_of(match[2]) is not None else match[1]

    def moved(match: re.Match[str]) -> str:
        return match[1] + (target_of(match[2]) or match[2])

    return LINK.sub(moved, WHOLE_LINK.sub(whole, markdown))
