# Every target does its own set-up: on a fresh machine `make demo` and `make test` are the only commands.
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready

.PHONY: demo test bench lint clean

$(READY): pyproject.toml constraints.txt
	test -x $(PY) || python3 -m venv $(VENV)
	$(PY) -m pip install --quiet -c constraints.txt torch==2.13.0
	$(PY) -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev]' || \
	  { $(PY) -m pip install --quiet -c constraints.txt 'setuptools>=77' wheel && \
	    $(PY) -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev]'; }
	touch $(READY)

demo: $(READY)
	$(PY) -m penstock demo

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m mypy

test: lint
	$(PY) -m pytest

bench: $(READY)
	$(PY) -m benchmarks

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
