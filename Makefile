# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
WORKERS ?= 2

export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-all lint install clean

demo: $(STAMP)
	$(BIN)/python examples/train_gpt.py --mesh 2,2,2 --compare --dtype float64 --out demo

test: lint
	$(BIN)/python -m pytest -q -m "ranks and not slow"
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile -m "not ranks and not slow"

test-all: lint
	$(BIN)/python -m pytest -q -m ranks
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile -m "not ranks"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/pyright --threads $(WORKERS)

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[test,examples]'
	$(BIN)/python -m pip install -q -c constraints.txt --no-deps timm  # its torchvision: see tests/torchvision_stand_in.py
	touch $@

clean:
	rm -rf $(VENV) demo build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
