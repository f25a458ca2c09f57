# Everything runs in .venv, which the first target that needs it makes (see tools/setup_env.py).
# TORCH_INDEX: an extra package index that has torch's CPU build, where plain pip does not find it.
# PYTHON: the interpreter to make .venv from; only needs Python 3.11 or later.

export TORCH_INDEX PYTHON
PYTHON ?=
SETUP := $(firstword $(PYTHON) $(shell command -v python3.11 python3 2>/dev/null) python3) tools/setup_env.py
RUN := .venv/bin/python
# VLLM=0.33 runs the tests on that release in place of the installed one: see tools/vllm_overlay.py.
VLLM ?=
OVERLAY := $(RUN) tools/vllm_overlay.py
PYTEST := $(if $(VLLM),PD_TEST_VLLM=$(VLLM) PYTHONPATH="$$($(OVERLAY) $(VLLM))" ,).venv/bin/pytest
# Processes for the tests without servers, which wait as much as they compute. One whose test hangs is ended and begun anew.
JOBS ?= 3
PARALLEL := -n $(JOBS) --dist worksteal -o faulthandler_exit_on_timeout=true

# What computes with torch, whose kernels are those of the processor: the reference attention. Nothing else moves or sums
# bytes with it on a CPU.
COMPUTING := tests/models

.PHONY: help setup setup-light test-light demo lint test test-unit test-kernels test-full test-next browser test-browser gpu faults soak fuzz contract bench bench-compare clean

help:
	@echo "make demo       P, D and a router on the CPU; compares every answer with a plain run"
	@echo "make test       lint, all tests without servers, a choice of those with servers"
	@echo "make test-unit  all tests without servers"
	@echo "make test-light geometry, protocol, side channel, transports: in an environment without vLLM and torch"
	@echo "make test-kernels  what computes, with torch's kernels for AVX2 and for any processor"
	@echo "make test-full  lint and every test, the whole end-to-end matrix included"
	@echo "make test-next  what touches vLLM on its next release, and pairs of both (a sample; VLLM=… for all)"
	@echo "make test-browser  the router's page /ui in Chromium, which it installs when root"
	@echo "make gpu        on a machine with GPUs: tests, conversion, transports, a pair; one report, in 15 minutes"
	@echo "make faults     at least 300 faults against real servers (an hour; the network part needs root)"
	@echo "make soak       100 000 random requests through one pair with few blocks (hours; SOAK='--requests N …')"
	@echo "make fuzz       coverage-guided fuzzing of every decoder of bytes from the network (FUZZ_SECONDS each)"
	@echo "make contract   WHEEL=…: what the package relies on in vLLM, looked up in that release's wheel"
	@echo "make lint       ruff, mypy, links in the documentation, Kubernetes manifests"
	@echo "make bench      the benchmarks (see benchmarks/)"
	@echo "make bench-compare  OLD=… NEW=… SINCE=…: the ratios of two runs of it (HEAD's and out/bench)"
	@echo "make setup      .venv only"

setup:
	@$(SETUP)
	@$(if $(VLLM),$(OVERLAY) $(VLLM))

demo:
	@$(SETUP) --plain
	@$(RUN) examples/demo.py

# Without vLLM and torch: a set-up of seconds for whoever works on what needs neither.
LIGHT := .venv-light/bin/pytest tests/geometry tests/protocol tests/sidechannel tests/transport
setup-light:
	@$(SETUP) --light

test-light: setup-light
	$(LIGHT) $(PARALLEL) -m "not gpu and not e2e and not guarantees and not ray and not libraries"

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	$(RUN) tools/check_links.py
	$(RUN) -m examples.manifests --check
	$(RUN) -m tests.support.kustomize examples/kubernetes

test-unit: setup
	$(PYTEST) $(PARALLEL)
	$(PYTEST) -m ray tests/integrations

test-kernels: setup
	ATEN_CPU_CAPABILITY=avx2 $(PYTEST) $(COMPUTING)
	ATEN_CPU_CAPABILITY=default $(PYTEST) $(COMPUTING)

test: lint
	$(PYTEST) $(PARALLEL)
	$(PYTEST) -m ray tests/integrations
	$(PYTEST) -m guarantees tests/guarantees
	$(PYTEST) -m "e2e and not matrix" tests/e2e tests/faults

test-full: lint
	PD_TEST_EFFORT=full $(PYTEST) $(PARALLEL)
	PD_TEST_STARVED=1 $(PYTEST) $(PARALLEL) tests/worker
	$(PYTEST) -m ray tests/integrations
	$(PYTEST) -m guarantees tests/guarantees
	$(PYTEST) -m e2e
	$(RUN) tools/compat_table.py

# What touches vLLM, on the release after the installed one; and servers of both, each in one role.
NEXT := 0.33
TOUCHING := tests/compat tests/contract tests/models tests/scheduler tests/test_connector.py tests/test_content.py
test-next: setup
	$(OVERLAY) $(NEXT)
	PD_TEST_VLLM=$(NEXT) PYTHONPATH="$$($(OVERLAY) $(NEXT))" .venv/bin/pytest $(PARALLEL) $(TOUCHING)
	.venv/bin/pytest -m e2e --row vllm -k gqa --results out/e2e-next.json tests/e2e/matrix/test_tokens.py

# The router's page in a headless Chromium, which Debian's packages bring where one is root.
browser: setup
	@$(SETUP) --browser

test-browser: browser
	$(PYTEST) -m browser tests/proxy

# On a machine with one GPU or more; vLLM comes from the interpreter that has it (PYTHON), or is installed.
gpu:
	@$(SETUP) --gpu
	.venv-gpu/bin/python -m tests.gpu

FAULTS_SEED ?= 1
faults: setup
	$(RUN) tests/faults/lines.py --seed $(FAULTS_SEED)
	$(RUN) tests/faults/two_hosts.py
	$(RUN) tests/faults/campaign.py --world elastic --faults 4 --seed $(FAULTS_SEED)
	$(RUN) tests/faults/soak.py --seconds 600 --seed $(FAULTS_SEED)

# SOAK: other options than 100 000 requests in mode pull, see tests/faults/soak.py --help.
SOAK ?=
soak: setup
	$(RUN) tests/faults/soak.py $(SOAK)

# What the package relies on in vLLM, checked in a wheel (or an unpacked one) that need not be installed.
contract: setup
	$(RUN) -m tests.contract.contract $(WHEEL)

FUZZ_SECONDS ?= 60
# atheris is built for few systems, so it is no part of the environment that everything else needs.
fuzz: setup
	$(RUN) -m pip --disable-pip-version-check install --quiet "atheris>=3,<4"
	$(RUN) tests/fuzz/coverage_guided.py -max_total_time=$(FUZZ_SECONDS)

# Measures everything, keeps the documents and renews the page's tables: an hour, in which nothing else should run.
bench: setup
	$(RUN) benchmarks/bind.py --json out/bench/bind.json
	$(RUN) benchmarks/layouts.py
	$(RUN) benchmarks/step.py
	$(RUN) benchmarks/scale.py
	$(RUN) benchmarks/convert.py
	$(RUN) benchmarks/transports.py
	$(RUN) benchmarks/pull.py --variants pd pd-introduced nixl-quiet plain --seldom pd nixl-quiet plain \
		--requests 40 --rounds 20
	$(RUN) benchmarks/busy_pairs.py
	$(RUN) benchmarks/phases.py
	$(RUN) benchmarks/waiting.py
	$(RUN) benchmarks/overlap.py
	$(RUN) benchmarks/overlap.py --one-step
	$(RUN) benchmarks/late_legs.py
	$(RUN) benchmarks/long_prompts.py
	$(RUN) benchmarks/long_pushes.py
	$(RUN) benchmarks/stalls.py
	$(RUN) benchmarks/rates.py --rates 1 4
	$(RUN) benchmarks/conversations.py --conversations 8
	$(RUN) benchmarks/routing.py --json out/bench/routing.json
	$(RUN) tools/performance_page.py --take out/bench

# SINCE: the commit whose figures stand on the old side, where OLD names no others.
SINCE ?= HEAD
OLD ?= out/bench-old
NEW ?= out/bench
bench-compare:
	@mkdir -p out/bench-old
	@rm -f out/bench-old/*
	@git archive $(SINCE) benchmarks/results | tar -x -C out/bench-old --strip-components=2
	$(RUN) benchmarks/compare.py $(OLD) $(NEW)

clean:
	rm -rf .venv .venv-light .venv-gpu .cache build out
