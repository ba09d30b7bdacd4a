# `make demo` and `make test` need Python 3.11+, pip and make, and install all else into .venv.
PYTHON ?= python3
# Where pip finds CPU builds of torch. Empty: the index that pip is set up with.
TORCH_INDEX ?=
VENV := .venv
PY := $(VENV)/bin/python
PIP_INDEX := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX),)
PYTEST_ARGS ?=
BENCH_ARGS ?=
SOAK_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test test-slurm soak check lint format protos bench bench-store bench-restart bench-leaks bench-failover clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

# ensurepip is missing from some distributions' Python: pip then installs into the environment from outside.
# $(call checked) says in one line what is missing; $(call environment,DIR) makes an environment without pip.
define checked
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
  || { echo "nvrx needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>/dev/null || echo missing); set PYTHON=/path/to/python3.11"; exit 1; }
@$(PYTHON) -c 'import pip, sys; sys.exit(tuple(map(int, pip.__version__.split(".")[:2])) < (22, 3))' 2>/dev/null \
  || { echo "make needs pip 22.3 or newer for $(PYTHON), to install into an environment from outside; try: $(PYTHON) -m pip install --upgrade pip"; exit 1; }
endef
environment = test -x $(1)/bin/python || $(PYTHON) -m venv --without-pip $(1)
pip_install = $(PYTHON) -m pip --python $(1)/bin/python --disable-pip-version-check install -q --root-user-action ignore

$(VENV)/.installed: pyproject.toml constraints.txt
	$(checked)
	@$(call environment,$(VENV))
	@echo "installing pinned packages into $(VENV) (torch is large; this takes a minute or two the first time)"
	@$(call pip_install,$(VENV)) $(PIP_INDEX) -c constraints.txt -e '.[torch,dev]'
	@touch $@

demo: $(VENV)/.installed  ## watch a small real training survive the loss of a worker and of a node (about a minute)
	$(PY) examples/demo.py

test: $(VENV)/.installed  ## run the tests
	$(PY) -m pytest $(PYTEST_ARGS)

test-slurm: $(VENV)/.installed  ## run the tests on a real Slurm cluster, made here (needs root and Debian's slurmctld, slurmd, slurm-client, munge)
	$(PY) -m pytest tests/slurm $(PYTEST_ARGS)

soak: $(VENV)/.installed  ## simulate 10,000 runs with faults (NVRX_SOAK_SEEDS=N: as many); see docs/simulator.md
	$(PY) -m tests.sim $(SOAK_ARGS)

check: $(VENV)/.installed .venv-protos/.installed  ## style, types, import contracts, protos
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports
	cd protos && ../$(VENV)/bin/buf lint
	$(PY) tests/protos_fresh.py

format: $(VENV)/.installed  ## rewrite the sources in the project's style
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# Generated code comes from an old compiler on purpose: it runs on newer protobuf runtimes, never the reverse.
.venv-protos/.installed: constraints-protos.txt
	$(checked)
	@$(call environment,.venv-protos)
	@echo "installing the protobuf compiler into .venv-protos"
	@$(call pip_install,.venv-protos) -r constraints-protos.txt
	@touch $@

protos: .venv-protos/.installed  ## generate nvrx/v1 from protos/nvrx/v1
	.venv-protos/bin/python protos/generate.py nvrx/v1

bench: $(VENV)/.installed  ## time recovery beside torchrun
	$(PY) bench/recovery.py $(BENCH_ARGS)

bench-store: $(VENV)/.installed  ## time our store server beside torch's own
	$(PY) bench/store.py $(BENCH_ARGS)

bench-restart: $(VENV)/.installed  ## time the start on the journal of a long run
	$(PY) bench/restart.py $(BENCH_ARGS)

bench-leaks: $(VENV)/.installed  ## look for leaks in 200 cycles of failing workers
	$(PY) bench/soak.py $(BENCH_ARGS)

bench-failover: $(VENV)/.installed  ## time how long a run is without a leader (needs etcd)
	$(PY) bench/failover.py $(BENCH_ARGS)

clean:  ## remove what the targets above made
	rm -rf $(VENV) .venv-protos build dist *.egg-info nvrx.egg-info
