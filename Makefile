# What a change must pass, step by step; `.ci/run` runs all of it in an environment of its own.
.PHONY: help check format style complexity types imports spelling test sanitize demo kernels gate lives bench rest \
    timed studies compare levels plain
.DEFAULT_GOAL := check
SHELL := bash
.SHELLFLAGS := -euo pipefail -c

RESULTS := build/results
SEEDS := 10000
JOBS := 2
STUDIES := $(patsubst perf/gate/baselines/simulate/%.any.json,%,$(wildcard perf/gate/baselines/simulate/*))
NATIVE := $(wildcard ops/native/*.cpp ops/native/*.h)

help: ## this list
	@awk -F ':.*## ' '/^[a-z%-]+:.*## / { printf "%-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

check: style complexity types imports spelling ## everything that takes seconds

format: ## write all code in its style
	ruff check --fix .
	ruff format .
	clang-format -i $(NATIVE)

style:
	ruff check .
	ruff format --check .
	clang-format --dry-run --Werror $(NATIVE)

complexity: ## of understanding a function
	complexipy core graphs memory server --max-complexity-allowed 15 --failed --plain

types:
	basedpyright

imports: ## which package may import which, as .importlinter says
	lint-imports

spelling:
	codespell core docs examples graphs memory ops perf server tests *.md pyproject.toml Makefile

test:
	pytest -q

sanitize: ## the native decoder at every level that this processor runs, watched by the compiler's sanitizers
	mkdir -p build/sanitize
	for level in $$(python -c "from chorus.ops.native_library import levels; print(*levels())"); do \
	    g++ -O1 -g -std=c++17 -pthread -ffp-contract=off -fsanitize=address,undefined -fno-sanitize-recover=all \
	        -Iops/native -include ops/native/decoder_$$level.cpp tests/ops/native_bits.cpp -o build/sanitize/$$level; \
	    build/sanitize/$$level > build/sanitize/$$level.bits; \
	    echo "$$level: $$(wc -l < build/sanitize/$$level.bits) steps"; \
	done

demo:
	chorus demo

kernels: ## compiled for GPUs that need not be there; after a change, with KEEP=--keep, the file is written anew
	mkdir -p $(RESULTS)
	python -m chorus.perf.kernels --compile sm_90,sm_80,sm_100,sm_120 --known perf/kernels/known.json $(KEEP) --workers $(JOBS) \
	    | tee $(RESULTS)/kernels

studies:
	mkdir -p $(RESULTS)
	python -m chorus.perf.simulate $(STUDIES) --quick --seeds 1 --jobs $(JOBS) --out $(RESULTS) > /dev/null

timed: ## with nothing beside it
	mkdir -p $(RESULTS)
	python -m chorus.perf.bench.allocator > $(RESULTS)/allocator
	python -m chorus.perf.gate.cpu_suite > $(RESULTS)/cpu
	python -m chorus.perf.bench.host_time --rows 1 32 --steps 40 > $(RESULTS)/host_time
	python -m chorus.perf.serving.decision_time --policies least-delay --decisions 400 --limit 500 > $(RESULTS)/decision_time
	python -m chorus.perf.serving.placement_plans --programs-to 5 --solve-seconds 60 \
	    > $(RESULTS)/placement_plans

compare: ## what is in $(RESULTS) with the baselines of this kind of machine
	python -m chorus.perf.gate --skip-unknown $(RESULTS)/*

gate: ## all of it, one after another
	rm -rf $(RESULTS)
	$(MAKE) --no-print-directory kernels studies timed compare

lives: ## seeded lives and histories of the engine
	python -m tests.world.seeds --seeds $(SEEDS) --jobs $(JOBS)
	python -m tests.attacks.history --questions 60

level-%: ## native tests on a lesser instruction set that the processor has
	CHORUS_CPU_ISA=$* pytest -q -n 0 -m native

plain: ## tests of numbers with the package that was installed without a compiler in $(PLAIN)
	export PYTHONPATH="$(PLAIN)"; \
	python -c "from chorus.ops import native_library as it; assert not any(map(it.built, it.LEVELS)), 'a native library'"; \
	pytest -q -n 0 -m numerics

levels: $(addprefix level-,$(LEVELS))

rest: studies lives types plain levels kernels check ## what .ci/run does after README's commands, two at a time

bench: ## beside what the machine allows, and peers: BESIDE="--beside vllm=ENV/bin/vllm llamacpp=TREE"
	python -m chorus.perf.bench --quick --device cpu --model-size 125m --out build/bench --sections limits peers $(BESIDE)
