# Each lane has an environment of its own, made on first use and refreshed when a file it was made from changes:
#   .venv         the demo: core, llama plugin and JAX backend, as a user installs them; no torch
#   .venv-test    the pinned test lane, with torch, torch_xla and libtpu, and the lint tools
#   .venv-clients clients of other projects, which tests run against a server; it reads .venv-test beneath
#   .venv-newest  the newest releases on a newer Python, without torch
# Override on the command line, e.g. `make test PYTHON=python3.12 PYTEST_ARGS="-k rope"`.

PYTHON         ?= python3
PYTEST_ARGS    ?=
PYTEST_WORKERS ?= 3
CHECKPOINT     ?= examples/checkpoints/pydoc-llama
PROMPT         ?= The with statement is used
MAX_NEW_TOKENS ?= 64
DIST           ?= dist

empty :=
space := $(empty) $(empty)

VENV        := .venv
VENV_TEST   := .venv-test
VENV_CLIENTS := .venv-clients
VENV_NEWEST := .venv-newest

FAMILIES      := llama gemma qwen mistral zoo
PARTS         := jax plan launch serve quantize train
DISTRIBUTIONS := . $(PARTS:%=plugins/ttpu-%) $(FAMILIES:%=plugins/ttpu-%)
PYPROJECTS    := $(DISTRIBUTIONS:%=%/pyproject.toml)
EDITABLE      := $(DISTRIBUTIONS:%=-e %)
# What only some users, developers and authors of plugins install.
TEST_EDITABLE := $(EDITABLE) -e plugins/ttpu-torch-xla -e plugins/ttpu-any -e conformance
PACKAGES      := ttpu.py ttpu_core $(foreach part,$(PARTS),plugins/ttpu-$(part)/ttpu_$(part)) \
                 plugins/ttpu-torch-xla/ttpu_torch_xla \
                 plugins/ttpu-any/ttpu_any \
                 conformance/ttpu_conformance \
                 $(foreach family,$(FAMILIES),plugins/ttpu-$(family)/ttpu_$(family)) \
                 examples/ttpu-olmo/ttpu_olmo examples/ttpu-pack-attention/ttpu_pack_attention
# What runs on a newer jax and Python: each path of the JAX backend once, an engine's steps, the families' own parts, and
# the core on a newer Python. The rest says nothing more about either, and `make test` runs it.
NEWEST_JAX    := attention attention_kernels backward_loop decode_attention decoder exchanged_experts fetch generate \
                 grouped kernels layer_loop local_experts matmul_devices matmul_pallas moe norms_fused paged_attention \
                 paged_decode_kernel paged_prompt_kernel parallel params parts ring_attention ring_products \
                 rope_product sampling saved_activations selective_scan sharded_load splash_on_parts state_space \
                 train_runner trained_products training_options vocabulary_loss
NEWEST_SERVE  := beam_search engine engine_ahead engine_async engine_logit_rules engine_lora engine_memory \
                 engine_pages engine_weights
NEWEST_TRAIN  := adapter_settings arguments config_file deepspeed
NEWEST_CORE   := chat_template checkpoint classifier_checkpoints config config_keys detokenizer generation_ranges \
                 latent_attention mxfp4_files padding parallelism quantization ranges recurrent_mixers rings rope \
                 shared_blocks shares spec text_part tied torus
NEWEST_TESTS  := $(NEWEST_CORE:%=tests/test_%.py) $(NEWEST_JAX:%=plugins/ttpu-jax/tests/test_%.py) \
                 $(NEWEST_SERVE:%=plugins/ttpu-serve/tests/test_%.py) $(NEWEST_TRAIN:%=plugins/ttpu-train/tests/test_%.py) \
                 $(wildcard $(patsubst %,plugins/ttpu-%/tests,gemma llama mistral qwen zoo))
# Of these, single tests that compile for seconds what others of their modules compile as well.
NEWEST_NOT    := a_prompt_longer_than_a_chunk a_seed_gives_the_same_tokens a_repetition_penalty_changes \
                 parts_of_a_prompt_share text_gives_text_and_ids a_transformers_streamer every_event_has_its_logprobs \
                 a_token_does_not_depend_on_those tokens_that_a_mesh_does_not_divide the_router_can_read \
                 in_bfloat16_results frequencies_match a_folder_without_weights_opens what_is_not_trained_stays \
                 rows_that_nobody_sends rows_that_have_no_room all_tokens_may_choose tokens_that_the_mesh_does \
                 computing_all_again keys_and_values_in_pairs what_is_not_finite_stays as_near_as_bfloat16 \
                 heads_that_do_not_fit_one_block two_cores_take_turns opened_to_train padding_that_a_kernel_leaves \
                 last_token_alone attended_to_in_blocks_with the_same_bit_for_bit_alone split_pages_have \
                 scales_of_several_tiles go_round_a_ring in_float32_steps pages_of_8_bits devices_share_wide_heads \
                 one_part_of_the_tokens that_round_their_masters an_optimizer_on_the_host gradient_is_the_reference_s \
                 are_those_of_the_formulas gradients_are_summed_in shards_experts_along_the shared_expert_in_bfloat16 \
                 quantized_experts_give_their two_cores_share each_devices_heads multiply_no_integers many_small_shares \
                 several_devices_are_those lowered_for_shardy packed_rows_of_a_users decoder_of_quantized_kernels_gives \
                 padding_and_packed_segments quantized_head_has_no a_prompt_fills_the_cache experts_and_rows_are_cut \
                 the_same_with_products segment_of_a_packed_row gated_features_of_one experts_along_the_axis \
                 kept_is_what_the_planner attention_keeps_its_products unrolled_layers_keep cache_of_another_dtype \
                 row_that_sees_nothing that_no_query_sees without_activations_that_fit a_program_that_is_missing_while \
                 tokens_of_padding_are_sent auto_exchanges_tokens moments_of_8_bits less_is_computed_again \
                 copies_of_new_tokens blocks_of_several_tiles a_row_of_padding_alone_is loop_of_deepspeed_trains \
                 window_ends_with_the_last size_of_chunks_does experts_that_return_their stream_takes_what_generate \
                 kernels_of_a_tpu_add_the in_bfloat16_devices_train tokenizers_answer_is_taken \
                 sums_of_a_gradient_are experts_are_read_one_by_one

PIP := -m pip install --quiet --disable-pip-version-check
# uv builds the distributions of this repository side by side, and fetches and unpacks gigabytes in half of pip's time.
UV  := -m uv pip install --quiet

# Everything runs on the CPU unless asked otherwise. Compiled programs are kept, for the next run, for the other test
# workers, and for the processes that tests start.
export JAX_PLATFORMS ?= cpu
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.cache/jax
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS ?= 0
# The tests start hundreds of Python processes: each would compile torch and jax anew where the shell forbids bytecode.
export PYTHONDONTWRITEBYTECODE :=
# One thread per test worker for torch, and no test may reach a model hub. Tests compile much and run it for milliseconds,
# so XLA:CPU is told to optimise little; `make demo` and the commands run what users run.
# Tests read no Python frames in lowered programs, so that none are written there.
TEST_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 JAX_TRACEBACK_IN_LOCATIONS_LIMIT=0
# Of families' variants beside the base, and of types that wrap another's text model, `make test` runs the quick checks,
# which leaves out half of conformance's time; `make conformance` runs all.
export TTPU_CONFORMANCE_LEVEL ?= standard
COMPILE_FAST := --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true \
    --xla_cpu_parallel_codegen_split_count=1
# Another third off. A newer XLA has no such flag, and one that it does not know ends the process.
COMPILE_FASTER := $(COMPILE_FAST) --xla_cpu_use_fusion_emitters=false

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test conformance survey environment lint newest newest-environment bench predictions dist clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.installed  ## Generate text from the checkpoint in this repository, and print tokens per second
	$(VENV)/bin/ttpu generate $(CHECKPOINT) --prompt "$(PROMPT)" --echo --max-new-tokens $(MAX_NEW_TOKENS)

test: $(VENV_TEST)/.installed $(VENV_CLIENTS)/.installed  ## Run every test with the pinned versions (PYTEST_ARGS="-k rope" for some)
	$(TEST_ENV) XLA_FLAGS="$(XLA_FLAGS) $(COMPILE_FASTER)" $(VENV_TEST)/bin/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal $(PYTEST_ARGS)

conformance: $(VENV_TEST)/.installed  ## Run every conformance check of every variant of the families
	$(MAKE) --no-print-directory test TTPU_CONFORMANCE_LEVEL=full PYTEST_ARGS="$(wildcard plugins/*/tests/test_*_conformance.py) $(PYTEST_ARGS)"

survey: $(VENV_TEST)/.installed  ## Survey the model types that have no row in docs/model-support.json yet, or another way to run now
	$(VENV_TEST)/bin/ttpu conformance --survey --json docs/model-support.json --markdown docs/model-support.md

environment: $(VENV_TEST)/.installed $(VENV_CLIENTS)/.installed  ## Install what tests and linters need, into .venv-test

lint: $(VENV_TEST)/.installed  ## Check style (ruff), types (mypy), docstrings, and who imports whom (import-linter)
	$(VENV_TEST)/bin/ruff check --output-format concise .
	$(VENV_TEST)/bin/mypy $(PACKAGES)
	$(VENV_TEST)/bin/lint-imports
	$(VENV_TEST)/bin/python scripts/check_docstrings.py $(PACKAGES)

newest:  ## Run the quick tests with the newest jax on a newer Python, if this machine has one
	@$(call with_newer_python,test-newest)

newest-environment:
	@$(call with_newer_python,$(VENV_NEWEST)/.installed)

define with_newer_python
newer=$$(scripts/find-newer-python $(PYTHON)) || exit 1; \
if [ -z "$$newer" ]; then \
    echo "newest: no Python newer than $$($(PYTHON) --version) with pip found here; nothing to run."; \
else \
    $(MAKE) --no-print-directory $(1) NEWER_PYTHON="$$newer"; \
fi
endef

.PHONY: test-newest
test-newest: $(VENV_NEWEST)/.installed
	@$(VENV_NEWEST)/bin/python -c 'import jax, platform; print("Python", platform.python_version(), "jax", jax.__version__)'
	$(TEST_ENV) XLA_FLAGS="$(XLA_FLAGS) $(COMPILE_FAST)" $(VENV_NEWEST)/bin/python -m pytest \
	    -n $(PYTEST_WORKERS) --dist worksteal \
	    -m "not torch and not tpu_compile and not slow" --ends -k "not ($(subst $(space), or ,$(strip $(NEWEST_NOT))))" \
	    $(PYTEST_ARGS) $(NEWEST_TESTS)

bench: $(VENV_TEST)/.installed  ## Run every script in benchmarks/
	@set -e; for script in benchmarks/*.py; do \
	    test -e "$$script" || { echo "bench: benchmarks/ holds no script yet."; break; }; \
	    echo "== $$script"; $(VENV_TEST)/bin/python "$$script"; \
	done

predictions: $(VENV_TEST)/.installed  ## Compile the programs of the tables in docs for TPUs again, and write these tables (an hour)
	$(VENV_TEST)/bin/python benchmarks/predictions.py
	$(VENV_TEST)/bin/python benchmarks/plan_peaks.py
	$(VENV_TEST)/bin/python benchmarks/quantized_programs.py --output benchmarks/results/quantized_programs.json
	$(VENV_TEST)/bin/python benchmarks/training_programs.py --output benchmarks/results/training_programs.json

dist: $(VENV_TEST)/.installed  ## Build every wheel and source distribution into dist/
	rm -rf $(DIST)
	set -e; for folder in $(DISTRIBUTIONS) plugins/ttpu-torch-xla plugins/ttpu-any conformance; do \
	    $(VENV_TEST)/bin/python -m uv build --quiet --no-build-isolation --out-dir $(DIST) $$folder; \
	done

clean:  ## Remove the environments, caches and build outputs
	rm -rf $(VENV) $(VENV_TEST) $(VENV_CLIENTS) $(VENV_NEWEST) .cache .pytest_cache .mypy_cache .ruff_cache .import_linter_cache \
	    .hypothesis build dist
	find . -name .git -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +

# -- environments ------------------------------------------------------------------------------------------

$(VENV)/.installed: $(PYPROJECTS) requirements/install.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python $(PIP) -r requirements/install.txt
	$(VENV)/bin/python $(UV) $(EDITABLE)
	@$(VENV)/bin/python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") and \
	    "torch is in $(VENV), where no dependency may bring it: run `pip show torch` there to see which one did.")'
	@touch $@

$(VENV_TEST)/.installed: $(PYPROJECTS) plugins/ttpu-torch-xla/pyproject.toml conformance/pyproject.toml \
    requirements/install.txt requirements/test.txt requirements/lint.txt
	test -x $(VENV_TEST)/bin/python || $(PYTHON) -m venv $(VENV_TEST)
	$(VENV_TEST)/bin/python $(PIP) -r requirements/install.txt
	$(VENV_TEST)/bin/python $(UV) $(TEST_EDITABLE) -r requirements/test.txt -r requirements/lint.txt
	@touch $@

PACKAGES_OF := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'

$(VENV_CLIENTS)/.installed: $(VENV_TEST)/.installed requirements/clients.txt requirements/clients-from-test.txt
	test -x $(VENV_CLIENTS)/bin/python || $(PYTHON) -m venv --without-pip $(VENV_CLIENTS)
	$(VENV_TEST)/bin/python $(UV) --python $(VENV_CLIENTS)/bin/python -r requirements/clients.txt \
	    --overrides requirements/clients-from-test.txt
	$(VENV_TEST)/bin/python $(PACKAGES_OF) > $$($(VENV_CLIENTS)/bin/python $(PACKAGES_OF))/test-lane.pth
	@touch $@

$(VENV_NEWEST)/.installed: $(PYPROJECTS) requirements/install.txt requirements/newest.txt
	test -x $(VENV_NEWEST)/bin/python || $(NEWER_PYTHON) -m venv $(VENV_NEWEST)
	$(VENV_NEWEST)/bin/python $(PIP) -r requirements/install.txt
	$(VENV_NEWEST)/bin/python $(UV) --upgrade $(EDITABLE) -r requirements/newest.txt
	@touch $@
