# Every target does its own set-up: on a fresh machine `make demo` and `make test` are the only commands.
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet -c constraints.txt
READY := $(VENV)/.ready

# Without bytecode files every process that a test starts would compile Penstock, and every run all tests.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo check fast test test-torch browser bench docs lint clean

# What builds the package comes first: without isolation, pip builds it with what is in the environment.
$(READY): pyproject.toml constraints.txt
	test -x $(PY) || python3 -m venv $(VENV)
	$(PIP) torch==2.13.0 'setuptools>=77' wheel
	$(PIP) --no-build-isolation -e '.[dev]'
	touch $(READY)

demo: $(READY)
	$(PY) -m penstock demo

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m mypy

# Lint, types and the tests that start no other processes, at once: types take one core.
check: $(READY)
	@$(MAKE) --no-print-directory -j2 lint fast

fast: $(READY)
	$(PY) -m pytest -n 2 --dist worksteal -q -m 'not processes and not slow and not cuda'

# The report's page is tested in a browser; where none can be installed, those tests say that they were skipped. The site
# is built by a test, too. Tests that wait for processes leave the two cores idle: four at a time.
test: lint browser $(VENV)/.docs
	$(PY) -m pytest -n 4 --dist loadfile

# The fast tests with another torch, in an environment of its own: make test-torch VERSION=2.12.0. PyPI's wheel of torch
# does not import without the CUDA packages that it depends on: about 3 GB are downloaded the first time.
TORCH_PY = .venv-torch-$(VERSION)/bin/python
TORCH_PIP = $(TORCH_PY) -m pip install --quiet -c .venv-torch-$(VERSION)/constraints.txt
test-torch:
	@test -n "$(VERSION)" || { echo "which torch? make test-torch VERSION=2.12.0"; exit 2; }
	test -x $(TORCH_PY) || python3 -m venv .venv-torch-$(VERSION)
	grep -v '^torch==' constraints.txt > .venv-torch-$(VERSION)/constraints.txt
	$(TORCH_PIP) torch==$(VERSION) 'setuptools>=77' wheel
	$(TORCH_PIP) --no-build-isolation -e '.[dev]'
	$(TORCH_PY) -m pytest -n 2 --dist loadfile -m 'not processes and not slow and not cuda'

# What a machine has not, Debian's packages bring, where they can be installed.
APT := test "$$(id -u)" = 0 && command -v apt-get >/dev/null && timeout 300 sh -c \
  'timeout 20 apt-get -qq update; apt-get -qq install -y --no-install-recommends "$$@"' apt >/dev/null 2>&1

browser:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || { $(APT) chromium; } || \
	  echo "no browser here: the tests that need one are skipped"

bench: $(READY)
	$(PY) -m benchmarks

$(VENV)/.docs: $(READY)
	$(PIP) --no-build-isolation -e '.[docs]'
	touch $(VENV)/.docs

# A broken link, or a name that is not there any more, ends it.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

clean:
	rm -rf $(VENV) .venv-torch-* build dist site src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
