# What a change must pass, step by step; `.ci/run` runs all of it in an environment of its own.
.PHONY: help affected served all-cases references same-references slow kernel-tests check format style complexity types imports spelling constraints docs docs-check style-report test sanitize demo kernels gate simulation lives bench rest \
    timed studies compare levels plain families oldest
.DEFAULT_GOAL := check
SHELL := bash
.SHELLFLAGS := -euo pipefail -c

RESULTS := build/results
SEEDS := 10000
JOBS := 2
BASE := main
STUDIES := $(patsubst perf/gate/baselines/simulate/%.any.json,%,$(wildcard perf/gate/baselines/simulate/*))
# The five that take two thirds of the studies' time, for `make slow`.
LONG_STUDIES := adapter-locality adapter-scheduling consolidation merged-skew swapping-profiles
INTERPRETED := $(shell find tests -name "test_*_interpreted.py" | sort)
# Libraries that the tests build: an installation has that of the best level.
LEVELS = $(shell python -c "import runpy; it = runpy.run_path('setup.py'); print(*it['runs'](it['features']())[1:])")
NATIVE := $(wildcard ops/native/*.cpp ops/native/*.h ops/native/*/*.h)

help: ## this list
	@awk -F ':.*## ' '/^[a-z%-]+:.*## / { printf "%-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

check: style complexity types imports spelling docs-check ## lint, types, import rules and spelling

format: ## format all code
	ruff check --fix .
	ruff format .
	clang-format -i $(NATIVE)

style: ## ruff and clang-format
	ruff check .
	ruff format --check .
	clang-format --dry-run --Werror $(NATIVE)

complexity: ## functions that are hard to follow
	complexipy core graphs memory server --max-complexity-allowed 15 --failed --plain

# By default Node has 4 GB, so that types of PyTorch and transformers are inferred again and again, and collects garbage
# after each 16 MB.
types: ## pyright in standard mode
	mkdir -p .types && ln -sfn .. .types/chorus
	NODE_OPTIONS="--max-old-space-size=8192 --max-semi-space-size=128" basedpyright

imports: ## which package may import which, as .importlinter says
	lint-imports

spelling: ## codespell
	codespell core docs examples graphs memory ops perf server tests *.md pyproject.toml Makefile

docs-check: ## generated pages are fresh, and the site builds
	python docs/generate.py --check
	NO_MKDOCS_2_WARNING=1 mkdocs build -q

constraints: ## write constraints.txt: the newest versions that pyproject.toml allows
	uv pip compile -q --universal --no-header --no-emit-index-url --no-annotate --python-version 3.11 --upgrade \
	    --extra dev --extra pull --extra otel --extra ray pyproject.toml -o constraints.txt

docs: ## write the generated pages, and build the site into build/site
	python docs/generate.py
	NO_MKDOCS_2_WARNING=1 mkdocs build -q

style-report: ## counts of words, sentences, parameters and positional values
	python -m tests.style_report

affected: ## the tests of the files that differ from BASE (main), as modules' docstrings name them
	tests="$$(python -m tests.affected --since $(BASE))"; \
	if [ -z "$$tests" ]; then echo "no test is of what differs from $(BASE)"; else \
	    CHORUS_TEST_SHARE=6 pytest -q -m "not slow and not triton" $$tests; fi

test: ## the test suite, both halves
	pytest -q
	pytest -q --served

served: ## the half of the test suite that a plain pytest leaves out: servers, clients, tools, and what starts processes
	pytest -q --served

all-cases: ## the test suite with all cases of the tests marked `wide`
	CHORUS_TEST_SHARE=1 pytest -q
	CHORUS_TEST_SHARE=1 pytest -q --served

references: ## ask transformers + peft everything again, and write tests/reference_answers; needs the extra `vision`
	python -c "import torchvision, PIL"
	rm -rf build/tests tests/reference_answers
	python -m tests.core.paths.record --jobs $(JOBS)
	$(MAKE) --no-print-directory test
	pytest -q -m vision
	python -m tests.references

same-references: ## transformers + peft answer as tests/reference_answers has it, about all models that the tests ask
	CHORUS_REFERENCES=all pytest -q
	CHORUS_REFERENCES=all pytest -q --served

slow: ## the slow tests and studies, which pytest and .ci/run leave out, and the quick ones of GPU kernels: half an hour
	pytest -q -m "(slow and not triton) or (triton and not slow)" --ignore-glob "*_interpreted.py"
	TRITON_INTERPRET=1 pytest -q -n 2 -m "not slow" $(INTERPRETED)
	HYPOTHESIS_PROFILE=thorough pytest -q -m "hypothesis and not slow and not triton"
	$(MAKE) --no-print-directory studies compare STUDIES="$(LONG_STUDIES)"

kernel-tests: ## the slow tests of GPU kernels and GPU steps: a quarter of an hour
	pytest -q -m "slow and triton"

sanitize: ## the native decoder under ASan and UBSan
	mkdir -p build/sanitize
	for level in $$(python -c "from chorus.ops.library.native_library import level; print(level())") $(LEVELS); do \
	    g++ -O1 -g -std=c++17 -pthread -ffp-contract=off -fsanitize=address,undefined -fno-sanitize-recover=all \
	        -Iops/native -include ops/native/decoder_$$level.cpp tests/ops/cpu/native_bits.cpp -o build/sanitize/$$level; \
	    build/sanitize/$$level > build/sanitize/$$level.bits; \
	    echo "$$level: $$(wc -l < build/sanitize/$$level.bits) steps"; \
	done

demo: ## the built-in model answers exactly
	chorus demo

kernels: ## compile the GPU kernels without a GPU; KEEP=--keep writes perf/kernels/known.json
	mkdir -p $(RESULTS)
	python -m chorus.perf.kernels --compile sm_90,sm_80,sm_100,sm_120 --known perf/kernels/known.json $(KEEP) --workers $(JOBS) \
	    | tee $(RESULTS)/kernels

oldest: ## the oldest Triton that a GPU may have takes the kernels, too
	[ -d build/triton-3.6 ] || pip install -q --no-deps --target build/triton-3.6 triton==3.6.0
	PYTHONPATH=build/triton-3.6 python -m chorus.perf.kernels --compile sm_90 --translate

studies: ## quick simulator studies
	mkdir -p $(RESULTS)
	python -m chorus.perf.simulate $(STUDIES) --quick --seeds 1 --jobs $(JOBS) --out $(RESULTS) > /dev/null

timed: ## benchmarks of the gate, on a quiet machine
	mkdir -p $(RESULTS)
	python -m chorus.perf.bench.allocator > $(RESULTS)/allocator
	python -m chorus.perf.gate.cpu_suite > $(RESULTS)/cpu
	python -m chorus.perf.bench.host_time --rows 1 32 --steps 40 > $(RESULTS)/host_time
	python -m chorus.perf.serving.decision_time --policies least-delay --decisions 400 --limit 500 > $(RESULTS)/decision_time
	python -m chorus.perf.serving.placement_plans --programs-to 5 --solve-seconds 60 \
	    > $(RESULTS)/placement_plans

compare: ## compare build/results with the baselines of this kind of machine
	python -m chorus.perf.gate --skip-unknown $(RESULTS)/* | sed '$$d' # without the JSON object

gate: ## kernels, studies, timed and compare, one after another
	rm -rf $(RESULTS)
	$(MAKE) --no-print-directory kernels studies timed compare

simulation: ## simulation tests of the engine, by seeds
	python -m tests.simulation.seeds --seeds $(SEEDS) --jobs $(JOBS)
	python -m tests.attacks.linearizability --questions 60

lives: simulation

families: ## the whole table of paths: every family and every form of adapter and weights, in every way; and GPU steps of each
	CHORUS_FAMILIES=every pytest -q tests/core/paths tests/core/executors/test_cuda_families_interpreted.py

library-%: ## the native library of an ISA level, in the source tree beside the installation's; nothing where it is new
	CHORUS_BUILD_LEVELS=$* python setup.py -q build_ext --inplace

libraries: $(addprefix library-,$(LEVELS)) ## library-% of all ISA levels that this processor has beside its best

level-%: library-% ## tests of native kernels and of an engine at one ISA level, such as level-avx2
	CHORUS_CPU_ISA=$* pytest -q -n 0 -m "native and not slow" tests/ops --ignore tests/ops/mixers tests/attacks tests/core/model/weights \
	    tests/core/model/program/test_native_decoder.py tests/core/adapters/test_adapter_vectors.py \
	    $(addprefix tests/core/test_parity.py::test_,32_concurrent_requests_over_8_adapters batches_of_every_kind_on_one_engine \
	    page_size_does_not_matter bfloat16_choices_are_the_references_within_rounding)
	CHORUS_CPU_ISA=$* pytest -q -n 0 -k "once and native and (mixed or bits)" tests/core/paths
	CHORUS_CPU_ISA=$* pytest -q -n 0 -m native -k "$*" tests/core/model/moe/test_experts.py tests/core/quantised

plain: ## comparisons of numbers of kernels and of an engine against a package built without a compiler in PLAIN
	export PYTHONPATH="$(PLAIN)"; \
	python -c "from chorus.ops.library import native_library as it; assert not any(map(it.built, it.LEVELS)), 'a native library'"; \
	pytest -q -n 0 -m "native(needed=False) and not slow" tests/ops tests/core/model tests/core/test_parity.py

levels: $(addprefix level-,$(LEVELS)) ## level-% of all ISA levels that this processor has beside its best

rest: STUDIES := $(filter-out $(LONG_STUDIES),$(STUDIES))
rest: served studies simulation types plain levels kernels oldest check ## everything that .ci/run does after README's commands

bench: ## race peers: BESIDE="--beside vllm=ENV/bin/vllm llamacpp=TREE"
	python -m chorus.perf.bench --quick --device cpu --model-size 125m --out build/bench --sections limits peers $(BESIDE)
