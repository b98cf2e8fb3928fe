"""What the documentation shows runs: the README's Python blocks, each as a program, and the examples in docstrings."""

import doctest
import importlib
import re
from pathlib import Path

import pytest
from processes import run_python

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
MODULES = sorted(
    f"{package}.{path.stem}" if path.stem != "__init__" else package
    for package in ("mok_jax", "models")
    for path in (ROOT / package).glob("*.py")
)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_block(block):
    run_python(block, preamble="")


@pytest.mark.parametrize("module", MODULES)
def test_docstrings(module):
    assert doctest.testmod(importlib.import_module(module)).failed == 0
