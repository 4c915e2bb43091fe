# make demo, make serve, make test: each builds .venv first if it is missing or out of date.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/installed
DEV := $(VENV)/installed-dev
CLIENTS := .venv-clients
MODEL ?= smollm2
TEST_WORKERS ?= 2
ELSEWHERE := --ignore tests/k8s/deployed --ignore tests/k8s/pods --ignore tests/scale_out --ignore tests/clients
GENERATED := build/proto
PROTOC := $(PY) -m grpc_tools.protoc

.PHONY: help demo serve test test-faults test-deployed test-scale-out test-clients test-tensor-parallel check-image lint api-reference bench-transfer bench-overlap bench-headless-prefill bench-overload bench-soak compile-kernels monitoring proto check-proto clean

help:
	@echo "make demo         the whole system on a real model: ask it with and without KV sharing, compare the bytes"
	@echo "make serve        leave a server up (MODEL=$(MODEL); settings from CROSSKV_* variables)"
	@echo "make test         linters, types, generated stubs, tests"
	@echo "make test-faults  every process of a cluster killed and stopped in every state of a request; make test has some"
	@echo "make test-deployed  ray job submit and serve deploy on a Ray cluster of its own; not part of make test"
	@echo "make test-scale-out  replicas on Ray nodes with networks of their own, also as pods; needs root; not part of make test"
	@echo "make test-clients  lm_eval, guidellm, LangChain and others against one cluster; not part of make test"
	@echo "make test-tensor-parallel  every pair of tensor-parallel sizes, transports, models and sharing rules; make test has some"
	@echo "make check-image  the image's recipe in a clean Debian, without a container engine; needs root and debootstrap"
	@echo "make lint         only linters and types"
	@echo "make api-reference  every module's docstrings as HTML, in build/api"
	@echo "make bench-transfer  GB/s of KV between two processes by each transport, beside a raw copy over TCP"
	@echo "make bench-headless-prefill  prefill of 2,000 tokens without the layers that nothing later depends on"
	@echo "make bench-overload  five times the requests that can be served: latency of the accepted, 429 for the others"
	@echo "make bench-soak   5,000 short requests: memory and descriptors of every process before and after"
	@echo "make compile-kernels  every Triton kernel for sm_80 and sm_90: registers, shared memory, spills (minutes)"
	@echo "make bench-overlap  how much of a transfer over 1 Gbit/s is hidden behind computation; needs root"
	@echo "make proto        generate the stubs anew from proto/"
	@echo "make monitoring   write dashboard, alert rules and docs/metrics.md anew from the metrics' definitions"
	@echo "make clean        remove .venv and everything generated"

demo: $(STAMP)
	$(PY) -m cluster.cli demo

serve: $(STAMP)
	$(PY) -m cluster.cli serve $(MODEL)

# Tests that start clusters, or kill replicas and watch how soon that is noticed, run one after another on a quiet
# machine. The others, of which some ask replicas too, wait for as long as it takes.
test: lint check-proto
	$(PY) -m pytest -m replicas $(ELSEWHERE)
	$(PY) -m pytest -m "not replicas" -n $(TEST_WORKERS) --dist loadgroup --no-loadscope-reorder $(ELSEWHERE)

# Prints a table and writes it to bench-results/faults.md. About an hour on two cores. pytest tests/faults -k some_cells
# adds to the table that is there.
test-faults: $(DEV)
	rm -f bench-results/faults.md
	CROSSKV_EVERY_FAULT=1 $(PY) -m pytest tests/faults

# A Ray cluster of its own, applications and jobs that come to it. Minutes, on a machine with nothing else to do.
test-deployed: $(DEV)
	$(PY) -m pytest tests/k8s/deployed

# Ray clusters of several nodes in namespaces. About fifteen minutes on two cores; needs root.
test-scale-out: $(DEV)
	$(PY) -m pytest tests/scale_out tests/k8s/pods

# The Dockerfile's instructions in build/image. MOUNTS are directories that pip's variables name.
check-image: $(DEV)
	$(PY) -m tests.k8s.image_root build/image $(MOUNTS)

# Clients in an environment of their own, over 1 GB. With CROSSKV_VLLM=…/bin/vllm also vllm bench serve of that vLLM.
test-clients: $(DEV) $(CLIENTS)/installed
	CROSSKV_CLIENTS=$(CLIENTS) $(PY) -m pytest tests/clients

$(CLIENTS)/installed: tests/clients/requirements.txt | $(STAMP)
	$(PY) -m venv $(CLIENTS)
	$(CLIENTS)/bin/pip install --disable-pip-version-check -r $<
	@touch $@

# Every pair of tensor-parallel sizes over both transports, every model with every sharing rule: hundreds of replicas.
test-tensor-parallel: $(DEV)
	CROSSKV_EVERY_PAIR=1 $(PY) -m pytest tests/peers tests/cluster/system/test_tensor_parallel.py \
	  --ignore tests/peers/test_logits.py --ignore tests/peers/test_process_group.py -k "not float64"

lint: $(DEV)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# A warning is an error, but for annotations that are more than there is when a program runs, such as gRPC's generics.
api-reference: $(DEV)
	$(PY) -W error::UserWarning -W "ignore:Error parsing type annotation" -W "ignore:Failed to run TYPE_CHECKING code" \
	  -m pdoc --docformat markdown --no-show-source -o build/api cluster worker kv_transfer kernels '!.*_pb2.*'

bench-transfer: $(STAMP)
	$(PY) -m benchmarks.transfer

bench-headless-prefill: $(STAMP)
	$(PY) -m benchmarks.headless_prefill

# Needs root, for network namespaces and tc.
bench-overlap: $(DEV)
	$(PY) -m benchmarks.overlap

bench-overload: $(DEV)
	$(PY) -m benchmarks.overload

bench-soak: $(DEV)
	$(PY) -m benchmarks.soak

compile-kernels: $(DEV)
	$(PY) -m kernels.compile

# The dashboard and the alert rules of k8s/components/monitoring, and docs/metrics.md.
monitoring: $(STAMP)
	$(PY) -m cluster.monitoring

proto: $(DEV)
	$(call generate,.)

check-proto: $(DEV)
	@rm -rf $(GENERATED) && mkdir -p $(GENERATED)
	$(call generate,$(GENERATED))
	@for stub in $$(cd $(GENERATED) && find . -type f); do \
	  diff -u "$$stub" "$(GENERATED)/$$stub" || { echo "$$stub is not what proto/ says: run make proto"; exit 1; }; \
	done

# Stubs lie in the package that speaks the contract, and import each other by that package's name.
define generate
	$(PROTOC) -I worker/wire=proto worker/wire/engine.proto --python_out=$(1) --pyi_out=$(1) --grpc_python_out=$(1)
	$(PROTOC) -I worker/wire=proto worker/wire/ranks.proto --python_out=$(1) --pyi_out=$(1)
	$(PROTOC) -I kv_transfer/wire=proto kv_transfer/wire/kv_transfer.proto --python_out=$(1) --pyi_out=$(1)
endef

$(STAMP): pyproject.toml constraints.txt
	@found=; for python in python3.11 python3.12 python3.13 python3; do \
	  if command -v $$python >/dev/null && \
	     $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	  then found=$$python; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "crosskv needs Python 3.11 or newer with its venv module, as python3.11, python3.12, python3.13 or python3."; \
	  echo "Debian, Ubuntu: apt-get install python3 python3-venv.  macOS: brew install python@3.12"; \
	  exit 1; \
	fi; \
	test -x $(PY) || { echo "creating $(VENV) with $$found"; $$found -m venv $(VENV); }
	@echo "installing PyTorch, Ray and the rest, over 1 GB; pip says nothing for minutes while it unpacks"
	$(PY) -m pip install --disable-pip-version-check -c constraints.txt -e .
	@touch $@

# What only tests and linters need.
$(DEV): $(STAMP)
	$(PY) -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) $(CLIENTS) build bench-results *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
