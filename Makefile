# Each target makes .venv and installs what it needs by itself: a clone, then `make demo` or `make test`.
PYTHON ?= python3
VENV := .venv
COMPILED := setup.py tensorpipe_ipc/_compiled.c tensorpipe_ipc/dlpack.h
PY := $(VENV)/bin/python
# The environment's own pip, or, where Debian's python3 made one without (package python3-venv), the system's.
PIP = $$($(PY) -m pip --version >/dev/null 2>&1 && echo $(PY) -m pip || echo $(PYTHON) -m pip --python $(PY))

.PHONY: demo test slow pure kills lint docs wheels bench figures clean

demo: $(VENV)/.demo
	$(PY) -m examples.demo

# Where the shell forbids bytecode, each process that a test starts would compile the package anew, and pytest all tests.
test slow pure kills: export PYTHONDONTWRITEBYTECODE :=

# Three at a time, also on two cores: most of what tests do is to wait for processes that import torch.
test: $(VENV)/.test
	$(PY) -m pytest -n 3 --dist worksteal -m 'not kills and not slow'

slow: $(VENV)/.test
	$(PY) -m pytest -n 3 --dist worksteal -m 'slow and not kills'

# What the compiled path does, once more without it: the tests of every day. With all the others: TENSORPIPE_IPC_COMPILED=0 make test slow
pure: $(VENV)/.test
	TENSORPIPE_IPC_COMPILED=0 $(PY) -m pytest -n 3 --dist worksteal -m 'not kills and not slow' tests/queues tests/memory tests/endpoints/test_endpoints.py

kills: $(VENV)/.test
	$(PY) -m pytest -n 2 -m kills $(TESTS)

lint: $(VENV)/.lint
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# The site, in site/. A link that leads nowhere, or a docstring that cannot be read, is an error.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

# Both wheels, in dist/: with the compiled path, for each CPython from 3.10 on, and without. Each is tried in an environment of
# its own.
wheels: $(VENV)/.wheels
	rm -rf build dist
	$(PY) -m build --quiet --wheel --outdir dist/built .
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PY) -m auditwheel repair --wheel-dir dist dist/built/*-abi3-*.whl
	TENSORPIPE_IPC_BUILD=0 $(PY) -m build --quiet --wheel --outdir dist .
	rm -rf build dist/built
	$(PY) -m tests.wheels dist

# Within a quarter of an hour: all peers in one run, and how ours grows. The pages are in bench/results.
bench: $(VENV)/.bench
	$(PY) -m bench all
	$(PY) -m bench growth --scale 0.02

# All figures of the README and of docs/performance.md: every comparison in one go, on a machine that does nothing else.
figures: $(VENV)/.bench
	$(PY) -m bench figures

$(PY):
	$(PYTHON) -m venv $(VENV) 2>/dev/null || $(PYTHON) -m venv --clear --without-pip $(VENV)

$(VENV)/.%: pyproject.toml constraints.txt $(COMPILED) | $(PY)
	$(PIP) install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[$*]'
	touch $@

# pip installs all or nothing, so each peer is asked for by itself; the page lists those that cannot be had, and why.
$(VENV)/.bench: pyproject.toml constraints.txt $(COMPILED) | $(PY)
	$(PIP) install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[plot]'
	$(PY) -m bench.wanted $(PIP) install --quiet --disable-pip-version-check --prefer-binary --constraint constraints.txt
	touch $@

# Types are checked against the tests' own dependencies too.
$(VENV)/.lint: $(VENV)/.test

clean:
	rm -rf $(VENV) build dist site *.egg-info tensorpipe_ipc/_compiled*.so
