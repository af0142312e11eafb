# The two commands: `make demo` and `make test`. Both need only Python 3.10 or newer and make, and make what is missing.
# Another Python: make demo PYTHON=/path/to/python3.12
# Another torch than that of constraints.txt, in a new environment: make clean, then make tests TORCH='==2.10.*', or
# TORCH='>=2.10' for the newest.

PYTHON ?= python3
TORCH ?=
TEST_PROCESSES ?= 2
# Besides tests/chaos, what `make tests` runs in a small size (tests/chaos/size.py).
SIZED_TESTS = $(shell grep -rl 'from tests.chaos.size' tests --include='test_*.py') tests/huggingface/test_ranks.py \
	tests/processes/test_ray.py tests/test_docs_code.py tests/data/test_hub_streams.py tests/training/test_resume_streams.py
DEEPSPEED_TESTS = tests/deepspeed $(wildcard tests/*/test_deepspeed*.py)

VENV := .venv
VENV_PYTHON := $(VENV)/bin/python
CONSTRAINTS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
PIP_INSTALL := $(VENV_PYTHON) -m pip install --disable-pip-version-check --constraint $(CONSTRAINTS)

.DEFAULT_GOAL := help
.PHONY: help demo test tests check docs docs-links bench gpu chaos deepspeed tests-of-deepspeed differential places public-scripts versions notebooks clean
.NOTPARALLEL:  # there is one environment to install into

help:
	@echo "make demo    train on scikit-learn's digits, evaluate, predict, save, plot"
	@echo "make test    lint, types, and the whole test suite"
	@echo "make check   lint and types only"
	@echo "make tests   the test suite only"
	@echo "make docs    the documentation, as a site in docs/_build/html"
	@echo "make docs-links   asks the network whether the pages that the documentation links to exist"
	@echo "make bench   the benchmarks"
	@echo "make gpu     tests and benchmarks that need a GPU, in ten minutes"
	@echo "make chaos   kills, crashes, damage and signals, in the size that a release must stand"
	@echo "make deepspeed   installs DeepSpeed in an environment of its own (.venv-deepspeed), and runs its tests on CPUs"
	@echo "make differential   the same scripts with the reference package and with this one; records and writes what differs"
	@echo "make places   one script on several processes and hosts, sharded, within Ray; writes a table of what differs"
	@echo "make public-scripts   the reference's examples with both; writes a table"
	@echo "make versions   runs a part of the tests with the oldest supported dependencies; writes a table"
	@echo "make notebooks   runs the tutorials in docs/tutorials, and stores their outputs in them"
	@echo "make clean   remove the environment ($(VENV))"

demo: $(VENV)/.demo
	@OMP_NUM_THREADS=1 $(VENV_PYTHON) examples/train_digits.py  # on a busy machine, more threads wait for each other

test: check tests

tests: $(VENV)/.dev
	@$(VENV_PYTHON) -m pytest --numprocesses $(TEST_PROCESSES)

check: $(VENV)/.dev
	@PYTHON=$(VENV_PYTHON) scripts/check

docs: $(VENV)/.dev
	@$(VENV_PYTHON) -m sphinx -W --keep-going -q -b html -d docs/_build/doctrees docs docs/_build/html
	@echo "Open docs/_build/html/index.html"

docs-links: $(VENV)/.dev
	@$(VENV_PYTHON) -m sphinx -q -b linkcheck -d docs/_build/doctrees docs docs/_build/links

bench: $(VENV)/.bench
	@$(VENV_PYTHON) -m benchmarks

# On a machine that has its own torch: make gpu GPU_PYTHON=python3, which installs nothing. With DeepSpeed, whose tests are
# skipped otherwise: make deepspeed, then make gpu GPU_PYTHON=.venv-deepspeed/bin/python.
gpu: $(if $(GPU_PYTHON),,$(VENV)/.dev)
	@PYTHONPATH=src:. $(or $(GPU_PYTHON),$(VENV_PYTHON)) -m pytest -q -p no:benchmark -m gpu $(shell grep -rl 'mark.gpu' tests)
	@PYTHONPATH=src:. $(or $(GPU_PYTHON),$(VENV_PYTHON)) -m benchmarks.gpu $(GPU_OPTIONS)

chaos: $(VENV)/.dev
	@CHAOS_SIZE=release CHAOS_RESULTS=$(CURDIR)/benchmarks/results $(VENV_PYTHON) -m pytest \
		--numprocesses $(TEST_PROCESSES) tests/chaos $(filter-out tests/chaos/%,$(SIZED_TESTS))

# It brings packages that no other test needs, and compiles what it uses at its first start: a minute.
deepspeed:
	@$(MAKE) --no-print-directory tests-of-deepspeed VENV=.venv-deepspeed

tests-of-deepspeed: $(VENV)/.deepspeed
	@DS_ACCELERATOR=cpu $(VENV_PYTHON) -m pytest $(DEEPSPEED_TESTS)

differential: $(VENV)/.reference
	@$(VENV_PYTHON) scripts/differential.py

places: $(VENV)/.dev
	@PYTHONPATH=. $(VENV_PYTHON) scripts/places.py

public-scripts: $(VENV)/.public-scripts
	@$(VENV_PYTHON) scripts/public_scripts.py

versions: $(VENV)/.dev
	@$(VENV_PYTHON) scripts/versions.py

notebooks: $(VENV)/.dev
	@$(VENV_PYTHON) scripts/notebooks.py

clean:
	rm -rf $(VENV) .venv-deepspeed

# An empty file marks each finished part of the environment, so that a second `make` has nothing to install.

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "'$(PYTHON)' does not start Python 3.10 or newer, which is needed here." >&2; \
		echo "Install one, or name one: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; \
		exit 1; }
	@$(PYTHON) -m venv --clear $(VENV) || { \
		echo "'$(PYTHON) -m venv $(VENV)' failed (the reason is above), so there is nowhere to install to." >&2; \
		echo "On Debian and Ubuntu: apt install python3-venv. Or name another Python:" >&2; \
		echo "make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; \
		exit 1; }
	@touch $@

# Alone and first: what comes later only asks for "torch", and is content with the build that is already there.
$(VENV)/.torch: $(VENV)/.created constraints.txt
	@echo "Installing torch: some minutes the first time, nothing after that. On Linux that may be the build for NVIDIA GPUs,"
	@echo "several gigabytes: for the small one, stop here, and install it into $(VENV) as torch's own page says."
	@$(if $(TORCH),sed '/^torch.*==/d' constraints.txt > $(CONSTRAINTS) && echo 'torch$(TORCH)' >> $(CONSTRAINTS))
	@$(PIP_INSTALL) torch
	@touch $@

# The extras ask for it too, but not for this one.
$(VENV)/.torchvision: $(VENV)/.torch
	@$(PIP_INSTALL) -qq torchvision
	@touch $@

$(VENV)/.demo $(VENV)/.bench: $(VENV)/.torch pyproject.toml
$(VENV)/.dev: $(VENV)/.torchvision pyproject.toml
$(VENV)/.demo $(VENV)/.bench $(VENV)/.dev:
	@echo "Installing this package and what 'make $(MAKECMDGOALS)' needs."
	@$(PIP_INSTALL) -qq --editable '.[$(patsubst .%,%,$(@F))]'
	@touch $@

# Its setup asks for torch and for what stands here before itself, and newer setuptools lack what it imports.
$(VENV)/.deepspeed: $(VENV)/.torch pyproject.toml
	@echo "Installing this package, DeepSpeed, and what 'make deepspeed' needs."
	@$(PIP_INSTALL) -qq 'setuptools<82' wheel ninja packaging psutil py-cpuinfo msgpack hjson einops pydantic tqdm \
		jaraco.text jaraco.functools backports.tarfile more_itertools
	@DS_BUILD_OPS=0 $(PIP_INSTALL) -qq --no-build-isolation deepspeed==0.19.8
	@$(PIP_INSTALL) -qq --editable '.[demo,transformers]' hypothesis pytest pytest-xdist
	@touch $@

# Its import name is this package's, so it gets a folder of its own, which only tests/differential puts on the path.
$(VENV)/.reference: $(VENV)/.dev
	@rm -rf $(VENV)/reference
	@$(PIP_INSTALL) -qq --no-deps --target $(VENV)/reference pytorch-accelerated==0.1.61
	@touch $@

# What those examples import besides. Without dependencies, so that torch and numpy stay as they are.
$(VENV)/.public-scripts: $(VENV)/.reference
	@$(PIP_INSTALL) -qq --no-deps --upgrade --target $(VENV)/public-scripts albucore==0.0.24 albumentations==2.0.8 \
		annotated-types evaluate func-to-script opencv-python-headless pycocotools pydantic pydantic-core \
		simsimd stringzilla typing-inspection
	@touch $@
