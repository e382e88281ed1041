"""Tests what a release consists of beside packages. The version is the same wherever it stands, and
.github/workflows calls targets and scripts that exist. packaging/release.sh refuses what is no
release."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

SOURCE = Path(os.environ.get("HALFSTEP_SOURCE", Path(__file__).resolve().parents[3]))
WORKFLOWS = sorted((SOURCE / ".github" / "workflows").glob("*.yml"))
HEADER = (SOURCE / "include" / "halfstep.h").read_text(encoding="utf-8")
VERSION = ".".join(re.findall(r"#define HALFSTEP_VERSION_[A-Z]+ +(\d+)", HEADER))
#: programs of the runners themselves
PROGRAMS = {"apt-get", "git", "gh", "mkdir", "mv", "rm"}
#: jobs that may do more than read
MAY = {"index": {"id-token"}, "files": {"id-token", "contents", "attestations"}}


def read(path):
    return (SOURCE / path).read_text(encoding="utf-8")


# ---- Versions ------------------------------------------------------------------------------------


def test_the_version_is_that_of_the_header():
    citation = yaml.safe_load(read("CITATION.cff"))
    version, day = re.search(r"^## ([\d.]+), (.*)$", read("CHANGELOG.md"), flags=re.M).groups()
    released = bool(re.fullmatch(r"\d{4}-\d{2}-\d{2}", day))
    assert (str(citation["version"]), version) == (VERSION, VERSION)
    assert released or day == "not released yet"
    assert str(citation.get("date-released")) == (day if released else "None")
    # Recipes and scripts take it from the header.
    for folder in ("packaging", ".github", "cmake", "scripts"):
        for file in (SOURCE / folder).rglob("*"):
            if file.is_file() and file.suffix not in {".txt", ".in", ".pyc"}:
                numbers = re.findall(r"[\d.]*\d", file.read_text(encoding="utf-8"))
                assert VERSION not in numbers, file


@pytest.fixture
def release(tmp_path):
    """Returns a tree that is the release of its version, and a function that runs release.sh."""
    for name in ("include/halfstep.h", "packaging/platforms.csv", "packaging/release.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(SOURCE / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text(
        f"# Changes\n\n## {VERSION}, 2027-01-31\n\nThe notes.\n\n## 0.0.1, 2026-01-01\n\nOld.\n"
    )
    (tmp_path / "CITATION.cff").write_text(f"version: {VERSION}\ndate-released: 2027-01-31\n")

    def run(*arguments):
        command = ["bash", str(tmp_path / "packaging" / "release.sh"), *arguments]
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return tmp_path, run


def test_a_release_has_notes_and_hashes(release):
    tree, run = release
    done = run(f"v{VERSION}")
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "The notes.", "")
    dist = tree / "dist"
    dist.mkdir()
    tags = [row.split(",")[0] for row in read("packaging/platforms.csv").splitlines()[1:]]
    names = [f"halfstep-{VERSION}-py3-none-{tag}.whl" for tag in tags]
    names += [f"halfstep-{VERSION}.tar.gz", "halfstep.deb"]
    for name in names:
        (dist / name).write_text(name)
    assert run(f"v{VERSION}", str(dist)).returncode == 0
    hashes = (dist / "SHA256SUMS").read_text().splitlines()
    assert sorted(line.split()[1] for line in hashes) == sorted(names)
    (dist / names[0]).rename(dist / "halfstep-0.0.1-py3-none-any.whl")
    done = run(f"v{VERSION}", str(dist))
    assert done.returncode == 1
    assert f"< {names[0]}" in done.stderr and "> halfstep-0.0.1-py3-none-any.whl" in done.stderr


@pytest.mark.parametrize(
    "file, old, new, said",
    [
        (None, "", "v9.9.9", f"tag v{VERSION}"),
        ("CHANGELOG.md", "2027-01-31", "not released yet", "with the date of the release"),
        ("CHANGELOG.md", f"## {VERSION}", "## 9.9.9", "begins with '## 9.9.9"),
        ("CITATION.cff", "version: ", "version: 9", "another version"),
        ("CITATION.cff", "2027-01-31", "2027-01-30", "'date-released: 2027-01-31'"),
    ],
)
def test_what_is_no_release_is_refused(release, file, old, new, said):
    tree, run = release
    if file:
        (tree / file).write_text((tree / file).read_text().replace(old, new, 1))
    done = run(f"v{VERSION}" if file else new)
    assert done.returncode == 1 and done.stdout == "" and said in done.stderr


# ---- Workflows -----------------------------------------------------------------------------------


def wrong_command(words):
    """Returns what is wrong with a command of a workflow, or None."""
    program, *arguments = words
    if program == "make":
        targets = set(re.findall(r"^([\w-]+):", read("Makefile"), flags=re.M))
        missing = [a for a in arguments if a not in targets]
        return f"no target {missing} in the Makefile" if missing or not arguments else None
    if program == "bash":
        script, *arguments = arguments
        if not (SOURCE / script).is_file():
            return f"no script {script}"
        name = re.escape(os.path.basename(script))
        usage = re.search(rf"^# {name}((?: [A-Z\[.\]-]+)*): ", read(script), flags=re.M)
        if not usage:
            return f"the first comment of {script} does not say its usage"
        words = usage[1].split()
        needed = sum(not word.startswith("[") for word in words)
        if not needed <= len(arguments) <= len(words):
            return f"{script} takes{usage[1]}, not {arguments}"
        return None
    if program in PROGRAMS or program.startswith(".") and os.access(SOURCE / program, os.X_OK):
        return None
    return f"{program} is neither make, nor a script of this tree, nor in PROGRAMS"


def wrong(text):
    """Returns all that is wrong with a workflow."""
    found = []
    flow = yaml.safe_load(text)
    if flow.get("permissions") != {"contents": "read"}:
        found.append("the workflow may do more than read")
    for name, job in flow["jobs"].items():
        needs = job.get("needs", [])
        for other in [needs] if isinstance(needs, str) else needs:
            if other not in flow["jobs"]:
                found.append(f"{name} needs {other}, which is no job")
        if set(job.get("permissions", {})) - MAY.get(name, set()):
            found.append(f"{name} may do more than it needs")
        if "uses" in job and not (SOURCE / job["uses"]).is_file():
            found.append(f"{name} uses {job['uses']}, which is no file")
        if "steps" in job and "timeout-minutes" not in job:
            found.append(f"{name} has no limit of time")
        for step in job.get("steps", []):
            if "uses" in step and not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"]):
                found.append(f"{step['uses']} is not pinned by the hash of a commit")
            given = step.get("with", {})
            if "checkout" in step.get("uses", "") and given.get("persist-credentials") is not False:
                found.append(f"{name} keeps the credentials of the checkout")
            script = re.sub(r"\$\{\{.*?\}\}", "VALUE", step.get("run", ""))
            for line in re.split(r"\n|&&", script):
                words = shlex.split(re.sub(r"\s*>\S+", "", line))
                found += [problem for problem in [words and wrong_command(words)] if problem]
    return found


def test_workflows_call_what_exists():
    assert [file.stem for file in WORKFLOWS] == ["release", "tests", "wheels"]
    pins, artifacts = {}, {"upload": set(), "download": set()}
    for file in WORKFLOWS:
        text = file.read_text(encoding="utf-8")
        assert wrong(text) == [], file.name
        for action, commit, version in re.findall(r"uses: (\S+)@(\S+) # (v[\d.]+)$", text, re.M):
            pins.setdefault(action, set()).add((commit, version))
        assert text.count("@") == len(re.findall(r"@[0-9a-f]{40} # v", text)), (
            "a version is missing"
        )
        for way, name in re.findall(r"actions/(\w+)load-artifact@.*\n +with:\n +name: (\w+)", text):
            artifacts[way + "load"].add(name)
    assert all(len(commits) == 1 for commits in pins.values()), pins
    assert artifacts["upload"] == artifacts["download"] == {"dist"}


@pytest.mark.parametrize(
    "old, new, said",
    [
        ("make test-packages", "make tset-packages", "no target"),
        ("packaging/try.sh", "packaging/tyr.sh", "no script"),
        ("try.sh dist", "try.sh dist dist dist", "takes DIST [PYTHON], not"),
        ("bash packaging/try.sh", "pip install torch && bash packaging/try.sh", "pip is neither"),
        ("needs: build", "needs: bulid", "no job"),
        ("contents: read", "contents: write", "more than read"),
        ("timeout-minutes: 60", "permissions: {packages: write}", "more than it needs"),
        ("timeout-minutes: 60", "", "no limit"),
        ("@08c6903cd8c0fde910a37f88322edcfb5dd907a8", "@v5", "not pinned"),
        ("persist-credentials: false", "persist-credentials: true", "credentials"),
    ],
)
def test_a_wrong_workflow_is_noticed(old, new, said):
    text = read(".github/workflows/wheels.yml")
    assert old in text
    assert any(said in problem for problem in wrong(text.replace(old, new, 1)))
