"""Draws SVG by hand for lab/figures.py: a picture, scales, and three kinds of figures.

Pictures follow the reader's light or dark theme. They are 480 units wide, so that their text can be
read on a screen of 400 pixels. Colour never says anything that a shape or a word does not say too.
"""

from __future__ import annotations

import math
from html import escape

WIDTH, MARGIN = 480, 14
STYLE = """
.back { fill: #ffffff }
text { fill: #1f2328; stroke: #ffffff; stroke-width: 3px; paint-order: stroke }
.small { fill: #59636e } .line { stroke: #d1d9e0 }
.zero { stroke: #818b98; stroke-dasharray: 4 3 } path.path { fill: none; stroke-width: 2 }
.good { fill: #0969da } .bad { fill: #cf222e } .fp32 { fill: #59636e } .mild { fill: #8250df }
.path.good { stroke: #0969da } .path.bad { stroke: #cf222e } .path.mild { stroke: #8250df }
@media (prefers-color-scheme: dark) {
.back { fill: #0d1117 } text { fill: #f0f6fc; stroke: #0d1117 }
.small { fill: #9198a1 } .line { stroke: #3d444d } .zero { stroke: #9198a1 }
.good { fill: #4493f8 } .bad { fill: #f85149 } .fp32 { fill: #9198a1 } .mild { fill: #ab7df8 }
.path.good { stroke: #4493f8 } .path.bad { stroke: #f85149 } .path.mild { stroke: #ab7df8 } }
"""


def number(value):
    """Returns a coordinate with one digit after the point, which is enough for a screen."""
    return f"{value:.1f}".removesuffix(".0")


class Scale:
    """Maps values to coordinates, in proportion or by logarithm. Values outside of the range stay
    at its ends."""

    def __init__(self, low, high, start, end, log=False):
        self.low, self.high, self.start, self.end, self.log = low, high, start, end, log

    def __call__(self, value):
        value = min(max(value, self.low), self.high)
        if self.log:
            part = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return self.start + part * (self.end - self.start)


class Picture:
    """An SVG in the making. `title` says what the figure shows, `lines` how it was measured."""

    def __init__(self, title, lines=()):
        self.title, self.out = title, []
        self.text(MARGIN, 24, title, 'font-size="16" font-weight="bold"')
        for i, line in enumerate(lines):
            self.text(MARGIN, 44 + 17 * i, line, 'class="small"')
        #: the first y that is free
        self.top = 34 + 17 * len(lines)

    def add(self, *lines):
        self.out += lines

    def text(self, x, y, words, extra=""):
        extra = extra and " " + extra
        self.add(f'<text x="{number(x)}" y="{number(y)}"{extra}>{escape(str(words))}</text>')

    def small(self, x, y, words, anchor="start"):
        self.text(x, y, words, f'class="small" text-anchor="{anchor}"')

    def line(self, x, y, x2, y2, kind="line"):
        place = f"M{number(x)} {number(y)}L{number(x2)} {number(y2)}"
        self.add(f'<path class="{kind}" d="{place}"/>')

    def curve(self, points, kind):
        place = "L".join(f"{number(x)} {number(y)}" for x, y in points)
        self.add(f'<path class="path {kind}" d="M{place}"/>')

    def mark(self, x, y, kind, square=False):
        """Draws a circle, or a square that stands on a corner."""
        if square:
            place = f"M{number(x - 6)} {number(y)}l6 -6l6 6l-6 6z"
            self.add(f'<path class="{kind}" d="{place}"/>')
        else:
            self.add(f'<circle class="{kind}" cx="{number(x)}" cy="{number(y)}" r="5"/>')

    def x_axis(self, scale, ticks, y, top, name=""):
        """Draws vertical lines at ticks (value and label), and the name of the axis below."""
        for value, label in ticks:
            self.line(scale(value), top, scale(value), y)
            self.small(scale(value), y + 16, label, "middle")
        if name:
            self.small((scale.start + scale.end) / 2, y + 34, name, "middle")

    def y_axis(self, scale, ticks, x, right, name=""):
        for value, label in ticks:
            self.line(x, scale(value), right, scale(value))
            self.small(x - 6, scale(value) + 4, label, "end")
        if name:
            self.small(MARGIN, scale.end - 10, name)

    def svg(self, height):
        title = escape(self.title, quote=True)
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {number(height)}"'
                f' width="640" font-family="Helvetica, Arial, sans-serif" font-size="13"'
                f' role="img" aria-label="{title}">',
                f"<title>{title}</title>",
                f"<style>{STYLE}</style>",
                '<rect class="back" width="100%" height="100%"/>',
                *self.out,
                "</svg>",
                "",
            ]
        )


def rows_of_marks(picture, groups, scale, ticks, form, sound, name):
    """Draws a mark for each value in a row of its own, and returns the SVG. `groups` are pairs of a
    heading and rows of (label, value). A value outside of `sound` (low, high) is marked as bad. The
    first group has circles and the others squares. A dashed line stands at 1 if `sound` has 1."""
    y = picture.top + 10
    first = y
    body = []
    for i, (heading, rows) in enumerate(groups):
        body.append((y + 12, heading, None, i))
        y += 21
        for label, value in rows:
            body.append((y + 9, label, value, i))
            y += 19
        y += 7
    picture.x_axis(scale, ticks, y, first, name)
    if sound[0] <= 1 <= sound[1]:
        picture.line(scale(1), first, scale(1), y, "zero")
    for y_row, label, value, i in body:
        if value is None:
            picture.text(MARGIN, y_row, label, 'font-weight="bold"')
            continue
        kind = "good" if sound[0] <= value <= sound[1] else "bad"
        picture.text(MARGIN + 6, y_row + 4, label)
        picture.mark(scale(value), y_row, kind, square=i > 0)
        picture.text(WIDTH - 6, y_row + 4, form(value), 'text-anchor="end"')
    return picture.svg(y + (44 if name else 26))


def panels(picture, titles, columns, height):
    """Returns the frames of panels as (left, right, top, bottom), and the height of the whole.
    Writes the title of each panel above it."""
    gap, left = 62, 54
    wide = (WIDTH - MARGIN - 8 - left + gap) / columns - gap
    frames, bottom = [], picture.top
    for i, title in enumerate(titles):
        x = left + (i % columns) * (wide + gap)
        top = picture.top + 26 + (i // columns) * (height + 48)
        bottom = top + height
        picture.text(x, top - 8, title, 'font-weight="bold"')
        frames.append((x, x + wide, top, bottom))
    return frames, bottom
