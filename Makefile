PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Not compiled: pip would compile thousands of modules of torch and transformers that no test imports.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
CHECK := $(BIN)/ruff format --check src tests benchmarks tools && $(BIN)/ruff check src tests benchmarks tools \
	&& $(BIN)/mypy && $(BIN)/lint-imports
# `-rR` names the tests that passed only when they were run again.
PYTEST := $(BIN)/python -m pytest -n 3 --dist load --reruns 1 -rR

.PHONY: help demo test test-all check bench docs dist clients new-rule clean
help:  ## show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

# Stamps, so that a second call costs nothing; torch comes first and pinned, so that nothing else can pull another build.
$(VENV)/.torch: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) pip  # the pip of Python 3.11 takes 38 s of CPU where a new one takes 15
	$(PIP) torch==2.13.0 numpy
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(PIP) -e '.[demo]'
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(PIP) -e '.[test,frameworks,check]'
	@touch $@

$(VENV)/.docs: $(VENV)/.dev
	$(PIP) -e '.[docs]'
	@touch $@

$(VENV)/.dist: $(VENV)/.dev
	$(PIP) -e '.[dist]'
	@touch $@

demo: $(VENV)/.demo  ## set up, then run a bundled failing script under torchmedic
	$(BIN)/torchmedic demo

# The linters run beside the tests, which leave a core idle now and then; what they say comes last. Status 3 is an error
# of pytest itself, not of a test: the tests are run once more. The scheduler `worksteal` of xdist ended two runs so.
test test-all: $(VENV)/.dev
	@( $(CHECK) ) > $(VENV)/check.log 2>&1 & checking=$$!; \
	run() { $(PYTEST) -m $(if $(filter test,$@),'not gpu and not slow','not gpu'); }; \
	run; tested=$$?; if [ $$tested -eq 3 ]; then run; tested=$$?; fi; \
	wait $$checking; checked=$$?; cat $(VENV)/check.log; exit $$((tested | checked))
test:  ## linters, types, and every test that needs no GPU
test-all:  ## the same, with the further cases of kinds that `make test` has

check: $(VENV)/.dev  ## ruff format and lint, mypy --strict, one-way imports
	$(CHECK)

bench: $(VENV)/.dev  ## measure the overhead of the healthy path (ratios in one run)
	$(BIN)/python benchmarks/overhead.py

docs: $(VENV)/.docs  ## write the index of diagnoses, and build the documentation site in docs/_build/site
	$(BIN)/python docs/make_index.py
	$(BIN)/python docs/make_site.py

dist: $(VENV)/.dist  ## build wheel and sdist, check them, and run the demo from the wheel in an empty environment
	$(BIN)/python tools/check_dist.py

clients: $(VENV)/.dev  ## hand annotations, SARIF, MCP, notebooks and Ray to real clients; needs npm and a network
	$(BIN)/python tools/check_clients.py

new-rule: $(VENV)/.dev  ## begin a rule: make new-rule CODE=TM180 NAME=bad-thing
	@$(BIN)/python tools/new_rule.py '$(CODE)' '$(NAME)'

clean:  ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
