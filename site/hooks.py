"""What mkdocs does for this site beside Markdown. It adds pages from outside docs/ and pages made
from the library, turns links to the repository's files into links of the site, and formulas into
MathML."""

import html
import pathlib
import posixpath
import re
import sys

import latex2mathml.converter
from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).resolve().parent.parent
#: pages of the site by the file of the repository that they are made of
PAGES = {
    f"{name}.md": f"project/{name.lower()}.md"
    for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY")
}
PAGES["bench/README.md"] = "evidence/speed.md"
for name in ("traps", "peers", "trainer", "offload"):
    PAGES[f"bench/{name}.md"] = f"evidence/{name}.md"
#: modules of this folder whose pages(root) returns Markdown by path
MADE = ("c_api", "program", "recipes")
FENCE = re.compile(r"^( *)(```+|~~~+).*?^\1\2[^\n]*$", re.M | re.S)
LINK = re.compile(r"(\]\(|\bsrc=\")([^)\s\"#:]+)(?=[#)\s\"])")
NAME = re.compile(r"<code>([^<]{1,28})</code>")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.S)


def made_pages():
    """Returns the pages that are made from the library, by their path in the site."""
    sys.path.insert(0, str(ROOT / "site"))
    pages = {}
    for module in MADE:
        pages.update(__import__(module).pages(ROOT))
    return pages


def on_files(files, config):
    """Adds pages and files that are not in docs/."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for page, text in made_pages().items():
        files.append(File.generated(config, page, content=text))
    for name in ("site.css", "favicon.svg", "iframe-worker.js"):
        path = str(ROOT / "site" / name)
        files.append(File.generated(config, f"assets/{name}", abs_src_path=path))
    return files


def on_page_markdown(markdown, page, config, files):
    """Turns links to files of the repository into links of the site, except in code."""
    sources = {page: source for source, page in PAGES.items()}
    source = sources.get(page.file.src_uri, "docs/" + page.file.src_uri)

    def target(match):
        """Returns a link to a file of the repository as a link to its place in the site."""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        if path in PAGES:
            place = PAGES[path]
        elif path.startswith("docs/"):
            place = path[len("docs/") :]
        elif (ROOT / path).is_file():
            # Any other file comes with the site, as plain text.
            place = f"files/{path}.txt"
            if files.get_file_from_path(place) is None:
                files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
        else:
            return match[0]
        return match[1] + posixpath.relpath(place, posixpath.dirname(page.file.src_uri) or ".")

    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [LINK.sub(target, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join(parts) + LINK.sub(target, markdown[end:])


def on_page_content(content, page, config, files):
    """Turns formulas into MathML, and prepares tables for narrow windows."""
    if page.is_homepage:
        page.meta["hide"] = ["navigation", "toc"]

    def mathml(match):
        """Returns a formula in MathML."""
        display = "block" if match[1] == "div" else "inline"
        return latex2mathml.converter.convert(html.unescape(match[2]), display=display)

    # Names stay on one line; longer code in a table breaks.
    return FORMULA.sub(mathml, NAME.sub(r'<code class="name">\1</code>', content))
