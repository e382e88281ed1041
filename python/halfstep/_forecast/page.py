"""Draws the report of halfstep.fit: as text of at most 100 columns, and as a page without scripts
in the style of the program's report."""

import textwrap
from html import escape

#: parts of a bar: fields of a row, the name of the part, its colour in light and dark
_PARTS = (
    (("weights", "extras", "frozen", "buffers"), "weights", "#2f6db5", "#3f7cc4"),
    (("states",), "states", "#4d8b3f", "#558f45"),
    (("gradients",), "gradients", "#b57614", "#b57a1c"),
    (("activations",), "activations", "#8b3fc7", "#a06ad0"),
    (("temporaries", "kernels"), "temporaries", "#c2255c", "#d2557c"),
    (("device",), "GPU's own", "#8b94a1", "#8e99a8"),
)
_STYLE = """
:root{color-scheme:light dark;--page:#fff;--ink:#1c2430;--soft:#5c6675;--faint:#e3e7ec;
--card:#f6f8fa;--code:#eef1f4;--good:#17703a;--bad:#b3261e;--accent:#1f5fbf;LIGHT}
@media (prefers-color-scheme:dark){:root{--page:#11151b;--ink:#e4e8ee;--soft:#9aa5b4;
--faint:#2a323d;--card:#181e26;--code:#1d242e;--good:#5fc983;--bad:#ff8a80;--accent:#7fb2ff;DARK}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.5 system-ui,-apple-system,
"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1120px;margin:0 auto;padding:32px 24px 64px}
h1{font-size:28px;line-height:1.2;margin:0 0 4px}
h2{font-size:19px;margin:40px 0 4px}
.lead{margin:20px 0 8px;padding:14px 18px;background:var(--card);
border-left:4px solid var(--accent);border-radius:0 6px 6px 0;font-size:17px}
.good{color:var(--good);font-weight:600}.bad{color:var(--bad)}
.wide-box{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}
th,td{padding:5px 8px;text-align:right;border-bottom:1px solid var(--faint);white-space:nowrap}
th{color:var(--soft);font-weight:600}
th.name,td.name{text-align:left}
pre{font-family:ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace;background:var(--code);
padding:12px 16px;border-radius:6px;overflow-x:auto;font-size:13.5px}
.legend{display:flex;flex-wrap:wrap;gap:4px 22px;margin:8px 0 2px;font-size:14px}
.legend span{display:inline-flex;align-items:center;gap:7px}
.key{width:13px;height:13px;border-radius:2px}
svg{display:block;width:100%;min-width:620px;height:auto}
svg text{font-size:12px;fill:var(--soft);stroke:var(--page);stroke-width:3px;paint-order:stroke}
svg text.total{fill:var(--ink);font-weight:600}
li{margin:2px 0;font-size:14px}
"""
_WIDTH = 100


def size(n):
    """Returns bytes as text."""
    return f"{n / 2**30:.2f} GiB" if n >= 2**29 else f"{n / 2**20:.2f} MiB"


def _cells(fit):
    """Returns titles of columns, the cells of each row, and the unit of sizes."""
    large = any(row.peak >= 2**29 for row in fit.rows)

    def sized(*fields):
        scale = 2**30 if large else 2**20
        return lambda row: f"{sum(getattr(row, f) for f in fields) / scale:.2f}"

    columns = {"way": lambda row: row.way, "peak": sized("peak")}
    columns["weights"] = sized(*_PARTS[0][0])
    columns["states"], columns["grads"] = sized("states"), sized("gradients")
    columns["activ"] = sized("activations")
    columns["temp"] = sized("temporaries", "kernels")
    for name, fields in (("host", ["host"]), ("bus", ["copied"]), ("disk", ["read", "written"])):
        if any(getattr(row, field) for row in fit.rows for field in fields):
            columns[name] = sized(*fields)
    if fit.memory is not None:
        columns["fits"] = lambda row: "yes" if row.fits else "no"
    if any(row.batch is not None for row in fit.rows):
        columns["fits"] = lambda row: f"{row.batch}" if row.batch else "no"
    cells = [[cell(row) for cell in columns.values()] for row in fit.rows]
    return list(columns), cells, "GiB" if large else "MiB"


def _places(fit):
    """Returns a line for each module that a peak is in."""
    found = {}
    for row in fit.rows:
        found.setdefault(row.place, []).append(row.way)
    return [
        f"The peak is at {place}: {', '.join(dict.fromkeys(ways))}."
        for place, ways in found.items()
    ]


def _meaning(fit, unit):
    text = f"Sizes are in {unit}."
    titles = _cells(fit)[0]
    if "host" in titles:
        text += " host: memory of the process. bus: bytes of each step to and fro."
    if "disk" in titles:
        text += " disk: bytes that each step reads and writes."
    if any(row.batch is not None for row in fit.rows):
        text += " fits: the largest batch that does."
    return text


def text(fit):
    """Returns the report for a terminal."""
    titles, cells, unit = _cells(fit)
    wide = [max(map(len, column)) for column in zip(titles, *cells)]

    def line(some):
        first = "  " + some[0].ljust(wide[0])
        return "  ".join([first, *(c.rjust(n) for c, n in zip(some[1:], wide[1:]))]).rstrip()

    out, last = textwrap.wrap(f"{fit.title}. {fit.lead()}", _WIDTH) + ["", line(titles)], None
    for row, some in zip(fit.rows, cells):
        if row.recipe != last:
            out.append(row.recipe)
            last = row.recipe
        out.append(line(some))
    out.append("")
    for note in [_meaning(fit, unit), *_places(fit), *fit.notes]:
        out += textwrap.wrap(note, _WIDTH, break_on_hyphens=False)
    if fit.best is not None:
        out += ["", *fit.best.code.splitlines()]
    return "\n".join(out)


def _bars(fit):
    """Returns the bars of all rows as SVG."""
    scale = max([row.peak for row in fit.rows] + [fit.memory or 0, 1])
    left, right, high = 330, 560, 20
    out, y, last = [], 4, None
    bottom = y + high * len(fit.rows) + 8 * len({row.recipe for row in fit.rows})
    if fit.memory is not None:
        x = left + fit.memory / scale * right
        out.append(
            f'<line x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{bottom}" stroke="var(--bad)"'
            f' stroke-width="1.5"/><text x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">'
            f"{size(fit.memory)}</text>"
        )
    for row in fit.rows:
        if row.recipe != last:
            y += 8
            out.append(f'<text x="0" y="{y + 12}" class="total">{escape(row.recipe)}</text>')
            last = row.recipe
        out.append(f'<text x="{left - 8}" y="{y + 12}" text-anchor="end">{escape(row.way)}</text>')
        x = float(left)
        for number, (fields, name, *_) in enumerate(_PARTS):
            part = sum(getattr(row, field) for field in fields)
            wide = part / scale * right
            out.append(
                f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{high - 5}"'
                f' fill="var(--p{number})"><title>{name}: {size(part)}</title></rect>'
            )
            x += wide
        out.append(f'<text x="{x + 6:.1f}" y="{y + 12}">{size(row.peak)}</text>')
        y += high
    return (
        f'<svg viewBox="0 0 {left + right + 90} {bottom + 20}" role="img"'
        f' aria-label="peaks by recipe and way">{"".join(out)}</svg>'
    )


def html(fit, whole=True):
    """Returns the report as a page, or as its inner part."""
    titles, cells, unit = _cells(fit)

    def line(tag, some, names):
        inner = "".join(
            f"<{tag}{' class=name' if i < names else ''}>{escape(cell)}</{tag}>"
            for i, cell in enumerate(some)
        )
        return f"<tr>{inner}</tr>"

    legend = "".join(
        f'<span><i class="key" style="background:var(--p{i})"></i>{name}</span>'
        for i, (_, name, *_) in enumerate(_PARTS)
    )
    rows = [line("td", [row.recipe, *some], 2) for row, some in zip(fit.rows, cells)]
    code = "" if fit.best is None else f"<h2>The lines</h2><pre>{escape(fit.best.code)}</pre>"
    notes = [_meaning(fit, unit), *_places(fit), *fit.notes]
    gives = {row.way: row.gives_up for row in fit.rows if row.gives_up}
    notes += [f"{way}: {what}." for way, what in gives.items()]
    style = _STYLE.replace("LIGHT", "".join(f"--p{i}:{p[2]};" for i, p in enumerate(_PARTS)))
    style = style.replace("DARK", "".join(f"--p{i}:{p[3]};" for i, p in enumerate(_PARTS)))
    inner = (
        f"<style>{style}</style><main><h1>Will it fit?</h1><p>{escape(fit.title)}</p>"
        f'<p class="lead">{escape(fit.lead())}</p>{code}<h2>Peaks</h2>'
        f'<div class="legend">{legend}</div><div class="wide-box">{_bars(fit)}</div>'
        f'<h2>Figures</h2><div class="wide-box"><table><thead>{line("th", ["recipe", *titles], 2)}'
        f"</thead><tbody>{''.join(rows)}</tbody></table></div><h2>What the figures mean</h2><ul>"
        f"{''.join(f'<li>{escape(note)}</li>' for note in notes)}</ul></main>"
    )
    if not whole:
        return inner
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>Will it fit? {escape(fit.title)}</title>{inner}</html>\n"
    )
