"""What the documents show is true: code runs, commands exist, tables and pictures are what their sources say.

Every Python block is a program of its own, run with what `pip install .` brings and no more. Commands of minutes are
not run here, but their options are read by the program they are for.
"""

import doctest
import fnmatch
import importlib
import importlib.metadata
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable

import pytest

from benchmarks import layer, picture, ranks
from models import train
from mok_jax.__main__ import main as mok_jax_main
from support import documents, worked_example
from support.documents import DOCUMENTS, ROOT
from support.processes import cpu_environment

MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for package in ("mok_jax", "models")
    for path in (ROOT / package).rglob("*.py")
)


@pytest.mark.parametrize("module", MODULES)
def test_docstrings(module):
    assert doctest.testmod(importlib.import_module(module)).failed == 0


# ---- Python blocks.

BLOCKS = [
    (path, number, block)
    for path in DOCUMENTS
    for number, block in enumerate(documents.blocks(path, "python"), start=1)
]
BLOCK_NAMES = [f"{path.relative_to(ROOT)}:{number}" for path, number, _ in BLOCKS]

# What a document asks its reader to install besides, in these words.
INSTALLED_BESIDES = {"flatbuffers": "pip install '.[export]'", "safetensors": "pip install '.[interop]'"}

# Runs each block in a process of its own. They are forked, since importing jax takes longer than most blocks, and an
# import of mok_jax starts no backend.
RUN_BLOCKS = """
import importlib.abc, json, os, sys, traceback

request = json.load(sys.stdin)


class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in request["absent"]:
            raise ModuleNotFoundError(f"{name} is not part of the documented installation", name=name)


sys.meta_path.insert(0, Refuse())
import flax.linen, flax.nnx, jax
import mok_jax, mok_jax.linen, mok_jax.nnx, mok_jax.sharding

os.chdir(request["folder"])
failed = []
for name, block in request["blocks"]:
    sys.stderr.flush()
    if child := os.fork():
        if os.waitpid(child, 0)[1]:
            failed.append(name)
        continue
    status = 1
    try:
        exec(compile(block, name, "exec"), {"__name__": "__main__"})
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)
print(json.dumps(failed))
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Names of the blocks that failed, and all that was printed."""
    blocks = list(zip(BLOCK_NAMES, (block for *_, block in BLOCKS), strict=True))
    request = {"absent": sorted(_absent_modules()), "folder": str(tmp_path_factory.mktemp("docs")), "blocks": blocks}
    process = subprocess.run(
        [sys.executable, "-W", "ignore:os.fork", "-c", RUN_BLOCKS],
        input=json.dumps(request),
        env=cpu_environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1]), process.stderr


@pytest.mark.parametrize("name", BLOCK_NAMES)
def test_block(name, ran):
    failed, errors = ran
    assert name not in failed, errors


def _absent_modules() -> set[str]:
    """Modules of the tools' and the tests' packages that a plain installation does not bring."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    there = _with_dependencies(project["dependencies"])
    absent = _with_dependencies(extras["models"] + extras["dev"]) - there - set(INSTALLED_BESIDES)
    modules = importlib.metadata.packages_distributions()
    return {name for name, packages in modules.items() if {_canonical(p) for p in packages} <= absent}


def _with_dependencies(requirements: list[str]) -> set[str]:
    found: set[str] = set()
    queue = list(requirements)
    while queue:
        requirement = queue.pop()
        name = _canonical(re.match(r"[\w.-]+", requirement).group())
        if "extra ==" in requirement or name in found:
            continue
        found.add(name)
        try:
            queue += importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:  # of another platform
            continue
    return found


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_what_is_installed_besides_is_said():
    for package, words in INSTALLED_BESIDES.items():
        assert any(words in path.read_text() for path in DOCUMENTS), package


# ---- Commands.


def _makes(target: str, *variables: str) -> None:
    """That make has the target, and that whoever gets ARGS knows them."""
    command = ["make", "--dry-run", f"PYTHON={sys.executable}", target, *variables]
    # Not with what the make was given that runs these tests.
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "ARGS")}
    made = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    for program in made.stdout.splitlines():
        found = re.search(r"-m (models\.train|benchmarks\.layer)(.*)", program)
        if found:
            PROGRAMS[found[1]](shlex.split(found[2]))


def _succeeds(name: str, *arguments: str) -> None:
    """A command of ours; without arguments only its name is mentioned."""
    if arguments:
        assert mok_jax_main([name, *arguments]) == 0


def _installs(*options: str) -> None:
    what = options[-1]
    extra = re.search(r"\[(\w+)\]", what)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extra is None or extra[1] in project["optional-dependencies"]


def _names_a_test(file: str, option: str, word: str) -> None:
    """That the file has a test which is chosen so."""
    assert option == "-k" and re.search(rf"^def test_\w*{word}", (ROOT / file).read_text(), re.MULTILINE)


PROGRAMS: dict[str, Callable] = {program.__name__: program.parse_arguments for program in (train, layer, ranks)}

# How each command is checked, and why it is not simply run.
COMMANDS: list[tuple[str, str, Callable[..., None]]] = [
    ("make", "takes minutes; CI runs `make lint`, `make test` and `make test-floor`", _makes),
    ("bash", "takes minutes; CI's own", lambda script: subprocess.run(["bash", "-n", script], cwd=ROOT, check=True)),
    ("pip install", "changes the environment; `make build` installs", _installs),
    ("pre-commit install", "changes the checkout; test_hooks reads the configuration", lambda: None),
    (".venv/bin/python -m pytest", "other tests", _names_a_test),
    ("python -m mok_jax", "run", _succeeds),
    ("python -m models.train", "takes a minute; tests/test_train.py", lambda *options: train.parse_arguments(options)),
    ("python -m models.sharded_decoder", "takes a minute; tests/test_sharded_decoder.py", lambda: None),
    ("python -m models.flax_moe", "takes a minute; tests/test_flax_example.py", lambda *options: None),
    ("python -m benchmarks.layer", "takes minutes; tests/test_benchmarks.py", lambda: None),
    ("python -m benchmarks.ranks", "takes a minute; tests/test_benchmark_ranks.py", lambda: None),
    ("python -m benchmarks.picture", "test_speed compares what it writes", lambda: None),
    ("python -m support.worked_example", "test_worked_example compares what it writes", lambda: None),
]
SHOWN = [(path, command) for path in DOCUMENTS for command in documents.commands(path)]


@pytest.mark.parametrize(("path", "command"), SHOWN, ids=[f"{path.name}:{command}" for path, command in SHOWN])
def test_command(path, command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # where commands leave their results
    words = shlex.split(command)
    for known, _, check in COMMANDS:
        beginning = known.split()
        if words[: len(beginning)] == beginning:
            check(*words[len(beginning) :])
            return
    pytest.fail(f"{path.name} shows a command that no test knows: {command}")


def test_hooks():
    """Hooks call what `make lint` calls, so that neither knows of a check that the other one does not."""
    made = re.search(r"^lint:.*?\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    tools = [("ruff check", "-m ruff check"), ("ruff format", "-m ruff format --check"), ("mypy", "-m mypy")]
    for name, call in [*tools, ("clang-format", "clang-format --dry-run --Werror")]:
        assert call in made and f"name: {name}\n" in hooks and call in hooks
    assert hooks.count("- id:") == len(made.splitlines())


def test_no_test_file_imports_another():
    """What they share is in tests/support, as CONTRIBUTING.md says."""
    for path in (ROOT / "tests").rglob("*.py"):
        imported = re.findall(r"^\s*(?:from|import) (test_\w+)", path.read_text(), re.MULTILINE)
        assert set(imported) <= {path.stem}, path.name  # itself, in another process


# ---- Tables, pictures, paths.


def test_speed():
    text = picture.README.read_text()
    rendered = picture.replace_between(text, "speed", picture.table())
    assert text == rendered and picture.PICTURE.read_text() == picture.picture(), "python -m benchmarks.picture"


def test_speed_marks_what_is_unusable(monkeypatch):
    drifted = picture.load("forward")
    for record in drifted.records.values():
        record["usable"] = record["shape"] != "v3"
    monkeypatch.setattr(picture, "load", lambda direction: drifted if direction == "forward" else LOADED["backward"])
    marked = [line for line in picture.table().splitlines() if line.startswith("|") and "(" in line.split("|")[7]]
    assert [line.split("|")[1].strip() for line in marked] == ["v3"]
    assert picture.picture().count("pale") > sum(not r["usable"] for r in drifted.records.values())


LOADED = {direction: picture.load(direction) for direction in picture.FILES}


def test_worked_example():
    text = rendered = worked_example.DOCUMENT.read_text()
    for name, table in worked_example.tables().items():
        rendered = picture.replace_between(rendered, name, table)
    assert text == rendered, "python -m support.worked_example, in tests"


def test_worked_example_is_proven():
    for direction in worked_example.DIRECTIONS:
        assert worked_example.error(direction) == ""


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_paths(path):
    """Links lead to files and headings that are there, and files that text names exist."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target, heading in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text):
        there = (path.parent / target) if target else path
        assert there.exists(), f"{path.name} links to {target}"
        assert not heading or heading in _headings(there.read_text()), f"{path.name} links to {target}#{heading}"
    for name in re.findall(r"`([\w./*-]+\.(?:py|h|cc|cu|cuh|md|txt))`", text):
        if name not in WRITTEN_BY_RUNS:
            assert any(fnmatch.fnmatch(file, f"*/{name}") for file in FILES), f"{path.name} names {name}"


WRITTEN_BY_RUNS = ("my.txt",)
FILES = [
    f"/{file.relative_to(ROOT)}"
    for folder in ("benchmarks", "csrc", "docs", "mok_jax", "models", "tests")
    for file in (ROOT / folder).rglob("*.*")
] + [f"/{file.name}" for file in ROOT.iterdir()]


def _headings(text: str) -> set[str]:
    """As GitHub names them."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
