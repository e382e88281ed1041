"""Turns what bench/gpu_session.py has run into Markdown for docs/results.md."""

import datetime
import importlib.metadata
import importlib.util


def cell(text):
    return text.replace("|", "\\|")


def head(gpu):
    """Returns the line above all tables. gpu: what `halfstep info --json` says of GPUs."""
    driver = f"driver of CUDA {gpu['driver'] // 1000}.{gpu['driver'] % 1000 // 10}"
    what = [driver, f"device code: {gpu['code']}"]
    if importlib.util.find_spec("torch"):
        what.append(f"torch {importlib.metadata.version('torch')}")
    names = ", ".join(one["name"] for one in gpu["gpus"])
    return f"**Measured on {datetime.date.today()} on {names} ({'; '.join(what)}).**"


def output(lines):
    """Returns the output of a program with tables. Text and tables are apart, as Markdown asks for.
    Output without a table is a listing."""
    if not any(line.startswith("|") for line in lines):
        return ["```", *lines, "```"]
    out = []
    for line, before in zip(lines, [lines[0], *lines]):
        out += [""] * (line.startswith("|") != before.startswith("|")) + [line]
    return out


def report(gpu, rows):
    """Returns a table of questions and answers, and then the tables of programs. A row has a
    question, the command, True if its output has tables, why it failed or None, and the lines of
    its output."""
    out = [head(gpu), "", "| question | answer |", "|---|---|"]
    for question, _, tables, failed, lines in rows:
        answer = "below" if tables else cell(lines[-1] if lines else "no output")
        out.append(f"| {question} | {f'**failed**, {failed}: ' if failed else ''}{answer} |")
    for _, command, tables, _, lines in rows:
        if tables:
            out += ["", f"`{command}`", "", *output(lines)]
    return "\n".join(out) + "\n"
