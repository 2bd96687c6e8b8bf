"""Dependencies, Makefile and CI script."""

import os
import re
import shutil
import subprocess
import tomllib
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def test_every_dependency_is_held_at_a_version_in_its_range() -> None:
    exact = constraints()
    for line in (*PROJECT["dependencies"], *chain(*PROJECT["optional-dependencies"].values())):
        requirement = Requirement(line)
        version = exact[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{line} but constraints.txt has {version}"


def test_constraints_are_exact_and_for_any_platform() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    for line in lines:
        assert line.startswith("#") or re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line), line
    assert len(constraints()) == sum(not line.startswith("#") for line in lines)


def test_the_package_data_that_pyproject_names_exist() -> None:
    assert (ROOT / PROJECT["readme"]).is_file()
    assert all((ROOT / name).is_file() for name in PROJECT["license-files"])
    module, _, function = PROJECT["scripts"]["outrider"].partition(":")
    assert f"def {function}(" in (ROOT / f"{module.replace('.', '/')}.py").read_text()


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_explains_every_target() -> None:
    shown = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    phony = re.findall(r"^\.PHONY: (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"help", "serve", "test", "test-clients", "check", "format", "bench"} <= set(phony)
    assert re.findall(r"^make (\S+) +\S", shown, re.MULTILINE) == phony


def test_the_ci_script_can_be_run() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)
    assert "make check" in script.read_text()
    assert {"make test", "make test-clients"} <= set(script.read_text().splitlines())
