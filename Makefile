# Each target does all of its own set-up in .venv and is quick the second time.
PYTHON ?= python3.11
HOST ?= 127.0.0.1
PORT ?= 8000
MODEL ?= smollm2
TORCH ?= torch==2.13.0
WORKERS ?= 2

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

# Builds the kernels, unless these very sources are built, where a server looks for them. Without a compiler it says so.
KERNELS := $(BIN)/python -m deepinfra_kernels "$$($(BIN)/python -c 'from deepinfra.models.cache import kernel_cache_dir as d; print(d())')"

.PHONY: serve test test-slow test-redis check format docs clean

serve: .venv/.serve
	$(KERNELS)
	$(BIN)/deepinfra pull $(MODEL)
	$(BIN)/deepinfra serve --model $(MODEL) --host $(HOST) --port $(PORT)

test: check
	$(KERNELS)
	$(BIN)/python -m pytest -m "not slow and not redis" -n $(WORKERS) --dist loadfile

test-slow: .venv/.dev
	$(KERNELS)
	$(BIN)/python -m pytest -m slow -n $(WORKERS) --dist loadfile

# A plug-in against a real redis-server, which its tests start themselves.
test-redis: .venv/.dev
	@command -v redis-server >/dev/null || { echo "make test-redis needs redis-server: apt-get install redis-server" >&2; exit 1; }
	$(PIP) install -e plugins/deepinfra-kv-redis
	cd plugins/deepinfra-kv-redis && ../../$(BIN)/python -m pytest -m redis

check: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: .venv/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The pages of the reference that are written from the code.
docs: .venv/.dev
	$(BIN)/python docs/reference/generate.py

.venv/bin/python:
	$(PYTHON) -m venv .venv

# torch first and pinned: a bare "torch" would be several gigabytes of CUDA on most machines.
.venv/.torch: .venv/bin/python
	$(PIP) install "$(TORCH)"
	touch $@

.venv/.serve: pyproject.toml kernels/pyproject.toml .venv/.torch
	$(PIP) install -e ".[torch]" -e kernels
	touch $@

.venv/.dev: pyproject.toml kernels/pyproject.toml .venv/.torch
	$(PIP) install -e ".[dev]" -e kernels
	touch $@ .venv/.serve

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
