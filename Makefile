# `make serve` and `make test` need only Python 3.11 or newer. Both create .venv.
PYTHON ?= python3
PORT ?= 3000
# Builder of images: docker, podman, buildah, or another backend of `bentoml containerize`.
BACKEND ?= docker
VENV := .venv
BIN := $(VENV)/bin
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal
PIP := $(BIN)/python -m pip install --quiet
PINNED := $(PIP) --constraint constraints.txt
# Installs exactly the listed files, checked by their hashes.
LOCKED := $(PIP) --no-deps --require-hashes --requirement

.PHONY: help setup serve serve-gpu test test-gpu gpu-first-look test-extended test-fast test-slow fuzz bench-training bench-gpu bench-engine bench-serve bench-embeddings lock image-cpu image-gpu default-model notebooks client site dist release check format clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 18

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: albert-serve needs Python 3.11 or newer. Set PYTHON, such as PYTHON=python3.12." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'

$(VENV)/.serve: pyproject.toml requirements/serve.txt | $(BIN)/python
	@echo "installing the packages for serving ..."
	$(LOCKED) requirements/serve.txt
	$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

# The build of torch depends on the machine, so torch has a version but no hash.
$(VENV)/.dev: $(VENV)/.serve requirements/dev.txt
	@echo "installing the packages for training, export and tests ..."
	$(PINNED) torch
	$(LOCKED) requirements/dev.txt
	@touch $@

setup: $(VENV)/.dev  ## install everything for development into .venv

serve: $(VENV)/.serve  ## serve the default model on port 3000 (PORT=... changes it)
	$(BIN)/albert-serve serve --port $(PORT)

$(VENV)/.gpu: $(VENV)/.serve
	@echo "installing CUDA and cuDNN (2 GB) ..."
	$(PINNED) --editable '.[gpu]'
	@touch $@

serve-gpu: $(VENV)/.gpu  ## serve on an NVIDIA GPU (driver 580 or newer); fails without one
	ALBERT_SERVE_DEVICE=cuda $(BIN)/albert-serve serve --port $(PORT)

test: $(VENV)/.dev  ## run the tests, except extended and slow tests
	$(PYTEST) -m 'not slow and not extended'

test-extended: $(VENV)/.dev  ## run additional cases, and tests of code that rarely changes (CI runs them)
	$(PYTEST) -m 'extended and not slow'

test-fast: $(VENV)/.dev  ## run the tests without processes, browsers and compilers
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto -m 'not slow and not process and not extended'

test-slow: $(VENV)/.dev  ## run the tests that take minutes
	$(BIN)/python -m pytest -m slow

test-gpu: $(VENV)/.dev $(VENV)/.gpu  ## run the tests that need a GPU; skipped without one (report: runs/test-gpu.xml)
	$(BIN)/python -m pytest -n 0 -v -m gpu --junitxml runs/test-gpu.xml

gpu-first-look: $(VENV)/.dev $(VENV)/.gpu  ## run the GPU tests and compare with transformers, in ten minutes (runs/gpu-first-look)
	PYTHON=$(BIN)/python benchmarks/gpu_first_look.sh runs/gpu-first-look

fuzz: $(VENV)/.dev  ## send 20,000 hostile requests, and compare replies with the API document
	$(BIN)/python -m pytest -s -m slow tests/albert_serve/server/test_fuzz.py tests/albert_serve/server/test_api_document.py

bench-training: $(VENV)/.dev  ## compare pretraining with the Trainer of transformers
	$(BIN)/python -m benchmarks.training

$(VENV)/.bench: $(VENV)/.dev
	@echo "installing the packages for comparison ..."
	$(PINNED) --group bench
	@touch $@

bench-engine: $(VENV)/.bench  ## compare the engine with transformers, ONNX Runtime and OpenVINO
	$(BIN)/python -m benchmarks.engine

bench-serve: $(VENV)/.dev  ## compare the service with BentoML over pipelines
	$(BIN)/python -m benchmarks.serve

GPU_BENCH := runs/benchmark-gpu
bench-gpu: $(VENV)/.dev $(VENV)/.gpu  ## compare training and inference on a GPU with transformers
	$(BIN)/python -m benchmarks.training --output $(GPU_BENCH)/training --shapes base xlarge --length 512
	$(BIN)/python -m benchmarks.engine --output $(GPU_BENCH)/engine --shapes 1x32 1x128 8x128 32x512 --num-texts 1024
	cat $(GPU_BENCH)/*/tables.md >$(GPU_BENCH)/tables.md

bench-embeddings: $(VENV)/.dev  ## compare embeddings of MODELS="FOLDER ..." and of PEERS="FOLDER ..." (sentence-transformers) on STSB=FILE, SICK=FILE, SQUAD=FILE
	$(BIN)/python -m benchmarks.embeddings $(MODELS) $(if $(PEERS),--sentence-transformers $(PEERS)) \
		$(if $(STSB),--stsb $(STSB)) $(if $(SICK),--sick $(SICK)) \
		$(if $(SQUAD),--squad $(SQUAD))

LOCK := $(BIN)/uv pip compile --quiet --no-config --no-annotate --no-header --universal \
	--python-version 3.11 --generate-hashes --constraint constraints.txt
lock: $(VENV)/.dev  ## pin the packages of `make` and of the images, with hashes (requirements/)
	$(LOCK) pyproject.toml --extra score --group build -o requirements/serve.txt
	$(LOCK) pyproject.toml --extra train --group dev --group site -o requirements/dev.txt \
		--override requirements/without-torch.txt
	$(LOCK) requirements/image-cpu.in -o requirements/image-cpu.txt
	$(LOCK) requirements/image-gpu.in -o requirements/image-gpu.txt

image-cpu: $(VENV)/.serve  ## build the image for CPUs (without docker: BACKEND=podman or buildah)
	$(BIN)/bentoml build
	$(BIN)/bentoml containerize albert-serve:latest --backend $(BACKEND) --image-tag albert-serve:cpu

image-gpu: $(VENV)/.serve  ## build the image for NVIDIA GPUs
	$(BIN)/bentoml build --bentofile bentofile.gpu.yaml
	$(BIN)/bentoml containerize albert-serve-gpu:latest --backend $(BACKEND) --image-tag albert-serve:gpu

PACKAGED := albert_serve/models/albert-small-en
# More questions, such as all of dev-v1.1.json, measure the cost more precisely.
SQUAD_DEV ?= tests/data/squad_dev/dev-v1.1.json
default-model: $(VENV)/.dev  ## export the default model in int8 into the package (SQUAD_DEV=...: questions for measuring)
	$(BIN)/python -m export models/albert-small-en $(PACKAGED) --precision int8 --overwrite \
		--keep-fp32 heads \
		--question-answering '$(SQUAD_DEV)' \
		--examples albert_serve/web/examples.json
	rm -f $(PACKAGED)/README.md

notebooks: $(VENV)/.dev  ## run the notebooks in examples/ and store their outputs
	$(BIN)/python -m scripts.notebooks

client: $(VENV)/.dev  ## generate the sync client from the async client
	$(BIN)/python -m scripts.unasync

site: $(VENV)/.dev  ## build the documents as a site in build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

dist: $(VENV)/.dev  ## build wheel and sdist in dist/, and try both in empty environments
	scripts/check_dist.sh

release: $(VENV)/.dev  ## set the version to VERSION=1.2.3, date the changelog, commit and tag
	$(BIN)/uv tool run bump-my-version bump --new-version $(VERSION)

check: $(VENV)/.dev  ## run ruff, mypy strict and import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev  ## format and fix the code with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
