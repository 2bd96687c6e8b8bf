"""How the C++ operators come to be, in processes of their own: a library once loaded stays."""

import os
import platform
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.operators import need_operators

ROOT = Path(__file__).parents[2]
LOAD = (
    "import logging, pathlib, sys, torch\n"
    "from engine.model.cpu_ops.build import load_operators\n"
    "logging.basicConfig(level=logging.INFO, format='%(message)s')\n"
    "operators = load_operators(pathlib.Path(sys.argv[1]))\n"
    "again = load_operators(pathlib.Path(sys.argv[1]) / 'elsewhere')\n"
    "print(operators is not None, again is not None)\n"
)
LOAD_PREBUILT = (
    "import logging, pathlib, sys, torch\n"
    "from engine.model.cpu_ops.build import load_operators\n"
    "logging.basicConfig(level=logging.INFO, format='%(message)s')\n"
    "operators = load_operators(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))\n"
    "print(operators.rms_norm(torch.full((1, 4), 2.0), torch.ones(4), 0.0).tolist())\n"
    "print(*torch.ops.loaded_libraries)\n"
)
# Stands in for a compiler: notes each call, takes its time, and hands out a library that is there already.
COMPILER = """#!/bin/sh
echo called $* >> {notes}
sleep 0.3
while [ "$1" != "-o" ]; do shift; done
cp {library} "$2"
"""


def start(cache_dir: Path, compiler: str) -> subprocess.Popen[str]:
    environment = os.environ | {"CXX": compiler}
    command = [sys.executable, "-c", LOAD, str(cache_dir)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def load(cache_dir: Path, compiler: str) -> tuple[str, str]:
    process = start(cache_dir, compiler)
    out, log = process.communicate(timeout=60)
    return out.strip(), log


@pytest.fixture
def compiler(tmp_path: Path) -> Path:
    need_operators()
    script = tmp_path / "compiler"
    library = next(path for path in loaded_libraries() if path.name.startswith("operators-"))
    script.write_text(COMPILER.format(notes=tmp_path / "notes", library=library))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


def loaded_libraries() -> list[Path]:
    import torch

    return [Path(path) for path in torch.ops.loaded_libraries]


def test_it_is_built_once_and_kept(tmp_path: Path, compiler: Path) -> None:
    out, log = load(tmp_path / "cache", str(compiler))
    assert out == "True True"
    assert "building the C++ operators, once" in log
    assert len((tmp_path / "notes").read_text().splitlines()) == 2  # Compiles, then links.
    out, log = load(tmp_path / "cache", "/nowhere/c++")
    assert (out, log) == ("True True", "")


def test_of_several_processes_one_builds(tmp_path: Path, compiler: Path) -> None:
    processes = [start(tmp_path / "cache", str(compiler)) for _ in range(3)]
    for process in processes:
        assert process.communicate(timeout=60)[0].strip() == "True True"
    assert len((tmp_path / "notes").read_text().splitlines()) == 2
    left = [path.name for path in (tmp_path / "cache/operators").iterdir() if not path.name.endswith(".lock")]
    assert len(left) == 1


def test_what_was_built_beforehand_needs_no_compiler_and_no_folder_to_write_to(
    tmp_path: Path, compiler: Path
) -> None:
    prebuilt = tmp_path / "prebuilt"
    command = [sys.executable, "-m", "engine.model.cpu_ops.build", str(prebuilt)]
    subprocess.run(command, env=os.environ | {"CXX": str(compiler)}, check=True, capture_output=True)
    compiled = [line for line in (tmp_path / "notes").read_text().splitlines() if "operators.cpp" in line]
    levels = [re.findall("-march=[^ ]+", line) for line in compiled]
    libraries = sorted(prebuilt.glob("*/*.so"))
    if platform.machine() == "x86_64":
        assert levels == [[], ["-march=x86-64-v3"], ["-march=x86-64-v4"]]
    assert len(libraries) == len(compiled)
    loaded = set()
    for capability in ("default", "avx2"):
        # As in an image: nothing to build with, and a cache that cannot be written to.
        environment = {"PATH": "/nowhere", "ATEN_CPU_CAPABILITY": capability, "PYTHONPATH": str(ROOT)}
        load = [sys.executable, "-c", LOAD_PREBUILT, "/proc/nowhere", str(prebuilt)]
        done = subprocess.run(load, env=environment, capture_output=True, text=True, check=True)
        result, place = done.stdout.split("\n", 1)
        assert (result, done.stderr) == ("[[1.0, 1.0, 1.0, 1.0]]", "")
        loaded.add(Path(place.strip()))
    assert len(loaded) == (2 if platform.machine() == "x86_64" else 1)
    assert loaded <= {*libraries}


@pytest.mark.parametrize(
    ("compiler_path", "reason"),
    [("/nowhere/c++", "there is no C++ compiler"), ("false --nothing", "failed to build them")],
)
def test_without_a_compiler_that_works_there_are_none_and_the_log_says_why(
    tmp_path: Path, compiler_path: str, reason: str
) -> None:
    out, log = load(tmp_path / "cache", compiler_path)
    assert out == "False False"
    assert "steps run without the C++ operators and take longer" in log
    assert reason in log


def test_a_library_that_cannot_be_loaded_is_said(tmp_path: Path, compiler: Path) -> None:
    assert load(tmp_path / "cache", str(compiler))[0] == "True True"
    [library] = (tmp_path / "cache/operators").glob("*/*.so")
    library.write_text("not a library")
    out, log = load(tmp_path / "cache", str(compiler))
    assert out.startswith("False")
    assert "file too short" in log
