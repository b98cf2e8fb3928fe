"""What the documentation shows runs: the README's Python blocks, each as a program on the installation that the text
around it asks for and no more, and the examples in docstrings."""

import doctest
import importlib
import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from processes import run_python

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = list(re.finditer(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL))
EXTRA = re.compile(r"pip install '\.\[(\w+)\]'")
MODULES = sorted(
    f"{package}.{path.stem}" if path.stem != "__init__" else package
    for package in ("mok_jax", "models")
    for path in (ROOT / package).glob("*.py")
)

# Everything else that happens to be installed here is hidden from a block.
HIDE = """
import sys

class Hidden:
    names = {names}

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name in cls.names:
            raise ModuleNotFoundError(f"no module named {{name!r}}: no dependency, and not in the text", name=name)

sys.meta_path.insert(0, Hidden)
"""


def extras_named(block):
    """Extras that the text between the block and the heading above it says to install."""
    return EXTRA.findall(README[README.rindex("\n## ", 0, block.start()) : block.start()])


def installed_with(extras):
    """Names of the distributions that `pip install '.[extras]'` brings."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(r for extra in extras for r in project["optional-dependencies"][extra])]
    todo, brought = [Requirement(text) for text in wanted], {"mok-jax"}
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if name in brought:
            continue
        brought.add(name)
        try:
            needs = [Requirement(text) for text in metadata.requires(name) or ()]
        except metadata.PackageNotFoundError:
            continue  # For other platforms.
        todo += [n for n in needs if n.marker is None or n.marker.evaluate({"extra": ""})]
    return brought


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_block(block):
    brought = installed_with(extras_named(block))
    owners = metadata.packages_distributions()
    hidden = {module for module, names in owners.items() if brought.isdisjoint(map(canonicalize_name, names))}
    run_python(block[1], preamble=HIDE.format(names=hidden))


def test_an_extra_that_is_named_is_brought():
    assert "flatbuffers" in installed_with(["export"]) and "flatbuffers" not in installed_with([])


@pytest.mark.parametrize("module", MODULES)
def test_docstrings(module):
    assert doctest.testmod(importlib.import_module(module)).failed == 0
