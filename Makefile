# Every target makes what it needs first: .venv with the versions of constraints.txt and the package in editable form.
# The stamp is older than what it depends on only when one of those files has changed, so a second run starts at once.

PYTHON   ?= python3
ARGS     ?=
DEMO_OUT ?= build/demo
COMPARE_OUT ?= build/compare
SCHEDULE ?= 20:data=4,zero_stage=3 40:data=3,zero_stage=2

VERSION  ?= 0.18.9

VENV     := .venv
STAMP    := $(VENV)/.installed
BIN      := $(VENV)/bin
TORCHRUN := $(BIN)/torchrun --standalone
CHECKED  := ds_dynatrain examples $(wildcard tools)

# Another DeepSpeed, another torch: a virtual environment that has it alone, and the packages of .venv behind it.
OTHER    := .venv-deepspeed-$(VERSION)
TORCH    := $(if $(filter file,$(origin VERSION)),2.11.0,$(VERSION))
FRONT    := .venv-torch-$(TORCH)
PACKAGES := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'

# Four files of tests at a time: while some wait, the others compute. One at a time: make test WORKERS=0
WORKERS  ?= 4

# What runs with every supported DeepSpeed and torch.
CORE     := tests/space tests/plan tests/transfer tests/data tests/adapters \
            $(addprefix tests/engine/test_,start.py matrix.py chains.py members.py faults.py checkpoints.py)

# What has ranks on the device without hardware, besides tests/device and tests/engine.
ON_DEVICE := $(addprefix tests/elastic/test_,axes.py together.py late_switches.py zero_init.py trainer.py accelerate.py) \
            $(addprefix tests/integrations/test_,trainer.py accelerate.py lightning.py lightning_more.py trl.py)

# The run that never switches is plain DeepSpeed, which on a CPU wants a compiler; without one it is train_gpt.py too.
STATIC   := $(if $(shell command -v c++),train_gpt_plain.py,train_gpt.py)

# One thread a rank: several ranks share the cores. The CPU also where there is a GPU: make demo DS_ACCELERATOR=cuda.
export OMP_NUM_THREADS ?= 1
export DS_ACCELERATOR  ?= cpu

.DEFAULT_GOAL := help
.PHONY: help install docs demo test test-all test-device test-deepspeed test-torch chaos deaths simulate lint types format bench bench-checkpoint compare feasibility clean

help:  ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1 \2/p' Makefile | while read -r name text; do printf '  make %-14s %s\n' "$$name" "$$text"; done

install: $(STAMP)  ## make .venv and install the package and its tools into it

$(STAMP): pyproject.toml constraints.txt ds_dynatrain/transfer/weigh.c
	@echo "Installing into $(VENV): minutes the first time, and nothing outside this folder."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,demo]'
	@touch $@

# What torch says of its own deprecations would stand in the progress bar, once a rank.
demo: export PYTHONWARNINGS ?= ignore
demo: $(STAMP)  ## train a GPT with plain DeepSpeed, with two live switches, and on nodes that come and go
	rm -rf $(DEMO_OUT)
	$(TORCHRUN) --nproc-per-node=2 examples/$(STATIC) --out $(DEMO_OUT) $(ARGS)
	$(TORCHRUN) --nproc-per-node=4 examples/train_gpt.py --schedule "$(SCHEDULE)" --out $(DEMO_OUT) $(ARGS)
	@echo "The plot of both runs: $(DEMO_OUT)/losses.png. Now nodes that come, go and die:"
	$(BIN)/python examples/elastic/nodes.py --out $(DEMO_OUT)/elastic

# Hundreds of processes import the package: it is compiled once for all of them, whatever the environment says.
test test-all: export PYTHONDONTWRITEBYTECODE :=
test: $(STAMP)  ## run the tests, the long sets apart
	$(BIN)/python -m pytest --numprocesses=$(WORKERS) $(ARGS)

test-all: $(STAMP)  ## run all tests: every combination, long chains
	$(BIN)/python -m pytest -m '' $(ARGS)

test-device: $(STAMP)  ## run what has ranks on a device without hardware: tests/device, all of tests/engine, elastic jobs of every axis, loops of Hugging Face and Lightning; two hours
	$(BIN)/python -m pytest -m '' tests/device $(ARGS)
	$(BIN)/python -m pytest -m '' --on-device tests/engine $(ON_DEVICE) $(ARGS)

test-deepspeed: $(OTHER)/.installed  ## run the core of the tests with another DeepSpeed: VERSION=0.18.9
	PATH="$(abspath $(BIN)):$$PATH" $(OTHER)/bin/python -m pytest $(CORE) $(ARGS)

$(OTHER)/.installed: $(STAMP)
	@echo "Installing DeepSpeed $(VERSION) into $(OTHER), in front of what $(VENV) has."
	$(BIN)/python -m venv --clear --without-pip $(OTHER)
	$(BIN)/python -m pip --python $(OTHER)/bin/python install --quiet --disable-pip-version-check --no-deps deepspeed==$(VERSION)
	echo "import site; site.addsitedir('$$($(BIN)/python $(PACKAGES))')" > $$($(OTHER)/bin/python $(PACKAGES))/behind.pth
	@touch $@

# The index has builds for CUDA: 2 to 4 GB. Another place for them: make test-torch FRONT=/folder VERSION=...
test-torch: $(FRONT)/.installed  ## run the core of the tests with another torch: VERSION=2.11.0
	PATH="$(abspath $(FRONT))/bin:$(abspath $(BIN)):$$PATH" $(FRONT)/bin/python -m pytest $(CORE) $(ARGS)

$(FRONT)/.installed: $(STAMP)
	@echo "Installing torch $(TORCH) into $(FRONT), in front of what $(VENV) has."
	$(BIN)/python -m venv --clear --without-pip $(FRONT)
	$(BIN)/python -m pip --python $(FRONT)/bin/python install --quiet --disable-pip-version-check torch==$(TORCH)
	echo "import site; site.addsitedir('$$($(BIN)/python $(PACKAGES))')" > $$($(FRONT)/bin/python $(PACKAGES))/behind.pth
	@touch $@

chaos: $(STAMP)  ## 200 random events in an elastic job on a busy machine; about ten minutes
	$(BIN)/python tools/chaos.py $(ARGS)

deaths: $(STAMP)  ## random deaths in a job with buddies, one at a time; about ten minutes
	$(BIN)/python tools/deaths.py $(ARGS)

simulate: $(STAMP)  ## 20,000 histories of an elastic job on a virtual network; about two minutes
	$(BIN)/python tools/simulate.py $(ARGS)

docs: $(STAMP)  ## write the reference from the code, and build the pages as a site: build/docs; warnings are errors
	$(BIN)/python tools/reference.py
	$(BIN)/python -m sphinx -q -W --keep-going -b html -c docs . build/docs
	@echo "The first page: build/docs/docs/index.html"

lint: $(STAMP)  ## check style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)  ## check types
	$(BIN)/mypy $(CHECKED)

format: $(STAMP)  ## bring the code into the form that lint wants
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## measure switches against the raw transport: the figures of the docs
	$(BIN)/python tools/bench_switch.py $(ARGS)

bench-checkpoint: $(STAMP)  ## measure checkpoints against raw writes and reads on this disk
	$(BIN)/python tools/bench_checkpoint.py $(ARGS)

compare: $(STAMP)  ## measure one change live and by checkpoint and restart: the table and picture of docs/benchmarks.md
	$(BIN)/ds-dynatrain compare --out $(COMPARE_OUT) $(ARGS)
	$(BIN)/python tools/keep_comparison.py $(COMPARE_OUT)
	@echo "The page with all charts: $(COMPARE_OUT)/compare.html"

feasibility: $(STAMP)  ## try every combination of axes and stages on DeepSpeed itself: the table of docs/dev/feasibility.md
	$(BIN)/python tools/feasibility.py --write docs/dev $(ARGS)

clean:  ## remove everything that make has made
	rm -rf $(VENV) .venv-deepspeed-* .venv-torch-* build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
