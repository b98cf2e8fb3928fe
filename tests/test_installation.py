"""What an installation brings: the package's attributes, the extension wherever Python is started, and one line for a
Python that is too old."""

import shutil
from importlib import metadata
from pathlib import Path

import pytest

import mok_jax
from mok_jax import native
from support.processes import run_python

PACKAGE = Path(mok_jax.__file__).parent

# Python's own finders alone: an editable installation's would find these sources whatever the path says.
PATH_ALONE = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if finder.__module__.startswith("_frozen_importlib")]
sys.path[:0] = {path}
"""
CALL = """
import jax.numpy as jnp
import mok_jax
from mok_jax import __main__, native

ones = jnp.ones((2, 8, 8))
assert mok_jax.moe(jnp.ones((4, 8)), jnp.zeros((4, 1), int), jnp.ones((4, 1)), ones, ones, ones).shape == (4, 8)
assert __main__.main(["plan", "--model", "mixtral-8x7b", "--gpus", "8", "--json"]) == 0
print(native.__file__, native.library().__file__)
"""


def test_submodules_are_imported_when_they_are_named():
    run_python(
        """
import sys, mok_jax
names = {"interop", "linen", "nnx", "routing", "sharding", "zoo", "__version__"}
assert names <= set(dir(mok_jax)) and "flax" not in sys.modules
assert mok_jax.zoo.LAYERS["deepseek-v3"].arguments()["num_experts"] == 256
assert mok_jax.routing and "flax" not in sys.modules
assert mok_jax.nnx.MoE and mok_jax.linen.MoE and mok_jax.sharding.make_mesh
assert not hasattr(mok_jax, "nothing") and isinstance(mok_jax.__version__, str)
""",
        preamble="",
    )


def test_version_of_what_is_not_installed(monkeypatch):
    """As in a checkout alone: a version all the same."""

    def version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    assert mok_jax.__version__ == "0+checkout"


def test_a_checkout_uses_the_installed_extension(tmp_path):
    """After `pip install .`, Python finds the checkout's sources first when it is started there."""
    checkout, installed = tmp_path / "checkout", tmp_path / "installed"
    for folder in checkout, installed:
        copy_sources(folder)
    extension = Path(shutil.copy(native.library().__file__, installed / "mok_jax"))
    path = PATH_ALONE.format(path=[str(checkout), str(installed)])
    found = run_python(path + CALL, preamble="").split()[-2:]
    assert found == [str(checkout / "mok_jax" / "native.py"), str(extension)]


def copy_sources(folder):
    """As a package that has no extension."""
    shutil.copytree(PACKAGE, folder / "mok_jax", ignore=shutil.ignore_patterns("*.so", "__pycache__"))


@pytest.fixture
def fresh_library():
    """The extension is looked for anew within the test, and after it."""
    native.library.cache_clear()
    yield
    native.library.cache_clear()


def test_an_extension_of_other_sources_is_refused(monkeypatch, fresh_library):
    built_with = native.INTERFACE
    monkeypatch.setattr(native, "INTERFACE", built_with + 1)
    text = rf"_native.* was built from other sources .* is {built_with}, not {built_with + 1}\. .*`make build`"
    with pytest.raises(ImportError, match=text):
        native.library()


@pytest.mark.parametrize("package", ("mok_jax", "models", "benchmarks"))
@pytest.mark.parametrize(("argv", "error"), (("-c", "ImportError"), ("-m", "SystemExit")))
def test_older_python(package, argv, error):
    """`python -m` ends with one line, since what it exits with is a text; an import raises."""
    code = f"""
import sys
sys.version_info, sys.argv[0] = (3, 11, 7, "final", 0), {argv!r}
try:
    import {package}
except {error} as error:
    print(error)
assert "jax" not in sys.modules
"""
    assert run_python(code, preamble="") == "mok_jax needs Python >= 3.12; this is 3.11\n"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            "fma avx2 bmi1 bmi2 f16c abm movbe avx512f avx512bw avx512cd avx512dq avx512vl",
            ["avx512", "avx2", "baseline"],
        ),
        ("fma avx2 bmi1 bmi2 f16c abm movbe avx512f", ["avx2", "baseline"]),  # of Xeon Phi: not all of x86-64-v4
        ("sse4_2 avx2", ["baseline"]),
        ("", ["baseline"]),
    ],
)
def test_builds_that_a_processor_runs(monkeypatch, flags, expected):
    """Of a package that travels; the best one is the first."""
    monkeypatch.delenv(native.BUILD_VARIABLE, raising=False)
    monkeypatch.setattr(native, "_processor_flags", lambda: set(flags.split()))
    assert native._fitting_builds() == expected


def test_a_build_is_chosen_by_name():
    """Or refused, here for being none, and for not being part of an installation from sources."""
    code = "from mok_jax import native; print(native.missing())"
    assert "MOK_JAX_CPU_BUILD=sse is none of avx512, avx2, baseline" in run_python(code, MOK_JAX_CPU_BUILD="sse")
    assert "No module named 'mok_jax._native_avx2'" in run_python(code, MOK_JAX_CPU_BUILD="avx2")
