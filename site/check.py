#!/usr/bin/env python3
"""Checks a built site: check.py FOLDER. No page may load anything from another host: a script, a
style sheet, a font, an image, a frame."""

import html.parser
import pathlib
import re
import sys

LOADING = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src"}
OUTSIDE = re.compile(r"(?:https?:)?//")


class Loads(html.parser.HTMLParser):
    """Collects what a page loads from other hosts."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        place = attrs.get(LOADING.get(tag, ""), "")
        if tag == "link" and attrs.get("rel") != "canonical":
            place = attrs.get("href", "")
        if OUTSIDE.match(place or ""):
            self.found.append(place)


def outside(folder):
    """Returns (file, address) of everything that the files of a folder load from other hosts."""
    found = []
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".html":
            page = Loads()
            page.feed(path.read_text(encoding="utf-8"))
            found += [(path, place) for place in page.found]
        elif path.suffix == ".css":
            text = path.read_text(encoding="utf-8")
            for place in re.findall(r"(?:url\(|@import)\s*[\"']?([^\"')\s]+)", text):
                if OUTSIDE.match(place):
                    found.append((path, place))
    return found


def main(folder):
    folder = pathlib.Path(folder)
    found = outside(folder)
    for path, place in found:
        print(f"{path} loads {place}; vendor it, or leave it out")
    pages = len(list(folder.rglob("*.html")))
    print(f"{pages} pages in {folder}: open {folder / 'index.html'}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
