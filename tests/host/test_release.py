"""What a release is made of: the metadata of the packages, the check before a tag, the workflows."""

import re
import runpy
import shutil
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import gemmery
from gemmery.lab.doctor.checks import OLDEST

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
RELEASE = runpy.run_path(str(ROOT / ".ci/release.py"))
WORKFLOWS = {
    path.name: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/workflows").glob("*.yml")
}
ADDRESS = "https://example.org/owner/name"


# --- metadata


def test_the_version_has_one_place():
    assert {"version", "readme", "urls"} == set(PROJECT["project"]["dynamic"])
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "src/gemmery/__init__.py"
    assert RELEASE["version"](ROOT) == gemmery.__version__
    assert "version" not in yaml.safe_load((ROOT / "CITATION.cff").read_text())


@pytest.mark.parametrize(
    ("system", "machine", "wanted"),
    [
        ("linux", "x86_64", True),
        ("linux", "aarch64", True),
        ("linux", "ppc64le", False),
        ("win32", "AMD64", False),
        ("darwin", "arm64", False),
    ],
)
def test_triton_is_required_where_its_wheel_is_the_right_one(system, machine, wanted):
    required = {each.name: each for each in map(Requirement, PROJECT["project"]["dependencies"])}
    assert set(required) == {"numpy", "torch", "triton"}
    assert required["triton"].marker.evaluate({"sys_platform": system, "platform_machine": machine}) is wanted
    for name, oldest in OLDEST.items():
        text = ".".join(map(str, oldest))
        assert required[name].specifier == SpecifierSet(f">={text}")


def test_pythons_are_those_that_the_release_tries():
    prefix = "Programming Language :: Python :: 3."
    listed = {
        "3." + text.removeprefix(prefix)
        for text in PROJECT["project"]["classifiers"]
        if text.startswith(prefix)
    }
    rows = WORKFLOWS["release.yml"]["jobs"]["try"]["strategy"]["matrix"]["include"]
    assert {row["python"] for row in rows} == listed
    assert all(version in SpecifierSet(PROJECT["project"]["requires-python"]) for version in listed)


@pytest.fixture
def hook(monkeypatch):
    """hatch_build.py, without hatchling."""
    plugin = ModuleType("hatchling.metadata.plugin.interface")
    plugin.MetadataHookInterface = object
    for name in ("hatchling", "hatchling.metadata", "hatchling.metadata.plugin"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, plugin.__name__, plugin)
    return runpy.run_path(str(ROOT / "hatch_build.py"))


def test_addresses_follow_from_one_setting(hook):
    assert hook["addresses"]("") == {}
    found = hook["addresses"](ADDRESS)
    assert found["Source"] == ADDRESS
    assert found["Changelog"] == f"{ADDRESS}/blob/HEAD/CHANGELOG.md"
    assert "Documentation" not in found
    assert (
        hook["addresses"]("https://github.com/Owner/name")["Documentation"] == "https://owner.github.io/name/"
    )
    # The labels that package indexes know, which are at most 32 characters long.
    assert all(len(label) <= 32 and address.startswith("https://") for label, address in found.items())


def test_links_of_the_description_lead_into_the_repository(hook):
    text = (ROOT / "README.md").read_text()
    assert hook["readme"](text, "") == text
    led = hook["readme"](text, ADDRESS)
    relative = re.findall(r"\]\((?!https?:|#)([^)]+)\)", text)
    assert len(relative) > 10
    assert not re.findall(r"\]\((?!https?:|#)[^)]+\)", led)
    assert f"({ADDRESS}/blob/HEAD/docs/support.md)" in led
    assert f"({ADDRESS}/raw/HEAD/benchmarks/results/groups.png)" in led


def test_the_citation_has_what_readers_of_it_require():
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(found)
    assert found["license"] == PROJECT["project"]["license"]
    assert [x["name"] for x in found["authors"]] == [x["name"] for x in PROJECT["project"]["authors"]]


# --- the check before a tag


@pytest.fixture
def ready(tmp_path):
    """As much of a repository as the check looks at, with nothing missing."""
    (tmp_path / "src/gemmery").mkdir(parents=True)
    (tmp_path / "src/gemmery/__init__.py").write_text('__version__ = "1.2.3"\n')
    text = (ROOT / "pyproject.toml").read_text()
    assert text.count('\nrepository = "') == 1
    (tmp_path / "pyproject.toml").write_text(
        re.sub(r'(?m)^repository = ".*"$', f'repository = "{ADDRESS}"', text)
    )
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n## [1.2.3] - 2031-02-03\n\n### Fixed\n\n- A sum.\n\n## [1.2.2] - 2031-01-01\n\n- Old.\n"
    )
    (tmp_path / "dist").mkdir()
    for name in ("gemmery-1.2.3-py3-none-any.whl", "gemmery-1.2.3.tar.gz"):
        (tmp_path / "dist" / name).touch()
    return tmp_path


def test_nothing_is_missing_where_all_is_there(ready):
    assert list(RELEASE["faults"](ready, "v1.2.3")) == []
    assert RELEASE["section"](ready, "1.2.3") == ("2031-02-03", "### Fixed\n\n- A sum.")


#: A file, what is replaced in it, and what is said then.
FAULTS = {
    "no address": (
        "pyproject.toml",
        f'"{ADDRESS}"',
        '""',
        "set repository under [tool.hatch.metadata.hooks.custom]",
    ),
    "no owner": ("pyproject.toml", f'"{ADDRESS}"', '"https://example.org/"', "set repository under"),
    "development": ("src/gemmery/__init__.py", "1.2.3", "1.2.3.dev0", "no version of a release"),
    "another version": ("src/gemmery/__init__.py", "1.2.3", "1.2.4", "the tag must be v1.2.4"),
    "no changes": ("CHANGELOG.md", "[1.2.3]", "[1.2.5]", "no heading '## [1.2.3] - YYYY-MM-DD'"),
    "unreleased": ("CHANGELOG.md", "2031-02-03", "unreleased", "has unreleased behind [1.2.3]"),
    "nothing said": ("CHANGELOG.md", "### Fixed\n\n- A sum.\n", "", "says nothing about 1.2.3"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_what_is_missing_is_said_with_what_to_do(ready, case):
    file, old, new, said = FAULTS[case]
    text = (ready / file).read_text()
    assert old in text
    (ready / file).write_text(text.replace(old, new))
    assert any(said in fault for fault in RELEASE["faults"](ready, "v1.2.3"))


def test_packages_of_another_version_are_noticed(ready):
    shutil.move(ready / "dist/gemmery-1.2.3.tar.gz", ready / "dist/gemmery-1.2.2.tar.gz")
    (fault,) = RELEASE["faults"](ready)
    assert "gemmery-1.2.2.tar.gz" in fault
    assert "run make package" in fault


def test_the_changelog_has_the_version():
    found = RELEASE["section"](ROOT, gemmery.__version__)
    assert found is not None
    assert found[0] == "unreleased" or re.fullmatch(r"\d{4}-\d\d-\d\d", found[0])
    assert found[1]


# --- workflows


def commands(workflow):
    """The lines of a workflow's shell steps."""
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    return [line.strip() for step in steps for line in step.get("run", "").splitlines()]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflows_run_what_there_is(name):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    lines = commands(WORKFLOWS[name])
    assert lines
    for line in lines:
        assert set(re.findall(r"\bmake ([a-z-]+)", line)) <= targets, line
        for path in re.findall(r"(?<![\w/])(?:\.ci|tests)/[\w./]+", line):
            assert (ROOT / path).is_file(), line


def test_a_release_is_checked_before_it_is_published():
    jobs = WORKFLOWS["release.yml"]["jobs"]
    assert any("make check-release" in step.get("run", "") for step in jobs["build"]["steps"])
    assert (jobs["try"]["needs"], jobs["publish"]["needs"]) == ("build", "try")
    # Nothing leaves a repository whose maintainer has not said so, and no job has more rights than it needs.
    assert "vars.PUBLISH_PACKAGES == 'yes'" in jobs["publish"]["if"]
    assert "vars.PUBLISH_SITE == 'yes'" in jobs["site"]["if"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert all(workflow["permissions"] == {"contents": "read"} for workflow in WORKFLOWS.values())


def test_code_of_strangers_does_not_reach_the_gpu():
    """YAML reads `on` as a truth value."""
    assert "pull_request" not in WORKFLOWS["gpu.yml"][True]
    assert "pull_request_target" not in WORKFLOWS["gpu.yml"][True]
    assert "vars.GPU_RUNNER == 'yes'" in WORKFLOWS["gpu.yml"]["jobs"]["check"]["if"]


# --- the table of versions


def test_versions_of_the_constraints_are_in_the_table():
    table = (ROOT / "docs/support.md").read_text().split("## Versions\n")[1].split("\n## ")[0]

    def pinned(name, file):
        return re.search(rf"^{name}==(\d+\.\d+)", (ROOT / file).read_text(), re.MULTILINE)[1]

    torch = pinned("torch", "constraints.txt")
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in table.splitlines()
        if line.startswith("| 2")
    ]
    assert rows
    for file in ("constraints.txt", "constraints-oldest.txt", "constraints-newest.txt"):
        assert any(row[0] == torch and pinned("triton", file) in row[1].split(", ") for row in rows), file
    # Every row says how it is known.
    kinds = ("measured", "run", "compiled", "predicted")
    for row in rows:
        assert row[4].split(",")[0] in {"none", *(f"**{kind}**" for kind in kinds)}, row
