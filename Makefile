# What a person types. `make demo` and `make test` need no other step before them.
.DEFAULT_GOAL := help
.PHONY: help demo env env-dev build test fmt lint crds soak soak-properties soak-agents faults cluster cluster-down scale kueue upgrade clean

PYTHON := .kernelfleet/python/bin/python

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

demo: env build ## eight PyTorch operators in, faster kernels out: examples/demo.yaml on this machine
	target/release/kernelfleet run examples/demo.yaml

env: ## the pinned Python environment in .kernelfleet/python (2.6 GB to download the first time)
	@agent-image/environment.sh runtime

env-dev: ## the same with ruff, mypy and pytest
	@agent-image/environment.sh dev

build: ## target/release/kernelfleet
	@[ -x target/release/kernelfleet ] || echo 'build: the program with its dependencies, about 7 minutes on two cores the first time' >&2
	cargo build --release --locked

test: env-dev ## everything that a merge is gated by; ends with the counts
	@tests/cluster/packages.sh
	@$(PYTHON) tests/all.py

fmt: env-dev ## formats Rust and Python
	cargo fmt
	$(PYTHON) -m ruff format agent-image tests examples

lint: env-dev ## formatting, clippy, ruff, mypy
	@$(PYTHON) tests/all.py --only lint

crds: ## writes crds/ and docs/api-reference.md from src/api
	cargo run --quiet --locked -- crds --write crds --reference docs/api-reference.md

soak: env build ## 100 KernelBench tasks checked, then the demo again and again for SOAK_MINUTES (default 30): leaks, flaky verdicts, leftovers
	@$(PYTHON) tests/soak.py --minutes $${SOAK_MINUTES:-30}

soak-properties: ## properties of the crate under fresh cases, PROPTEST_CASES (default 20000) each; a failure's seed is to be kept in tests/regressions
	KERNELFLEET_FRESH_SEEDS=1 PROPTEST_CASES=$${PROPTEST_CASES:-20000} cargo test --release --locked --lib -- simulation:: validate:: \
		no_text_makes no_event_makes distance_is memory_is_bounded

soak-agents: ## eight agents of 200 turns against a scripted endpoint: lost turns, memory of an agent
	cargo test --release --locked --test agents_soak -- --ignored --nocapture

faults: env-dev build ## a job of 20 episodes with 80 kills compared with one that is left alone, on the test bed; as root, half an hour
	@tests/cluster/packages.sh
	KERNELFLEET_FAULTS_EPISODES=20 KERNELFLEET_FAULTS_KILLS=80 KERNELFLEET_PROGRAM=target/release/kernelfleet \
		$(PYTHON) -m pytest -v -s tests/e2e/test_7_faults.py

cluster: env build ## a whole Kubernetes on this machine with the chart installed, as root (docs/test-bed.md); NODES=2 for two nodes
	tests/cluster/build.sh
	tests/cluster/up.sh $${NODES:-1}
	tests/cluster/images.sh
	tests/cluster/install.sh

cluster-down: ## ends it and leaves nothing
	@tests/cluster/down.sh

scale: env build ## 10,000 agent pods of 200 jobs on kwok's nodes: what the operator costs, into docs/evidence/scale.json; as root, no cluster up
	tests/cluster/build.sh
	KERNELFLEET_CLUSTER_QPS=300 tests/cluster/up.sh 1
	tests/cluster/images.sh
	tests/cluster/install.sh
	KERNELFLEET_CLUSTER_QPS=300 $(PYTHON) tests/perf/scale.py
	tests/cluster/down.sh
	$(PYTHON) tests/gpu/report.py

kueue: env-dev build ## Kueue itself, built from its module, admits jobs under a quota on the test bed, as root
	$(PYTHON) -m pytest -v -s tests/e2e/long_kueue.py

upgrade: env-dev build ## from an earlier commit's chart, images and ledger to this one's while a job runs, on the test bed, as root
	$(PYTHON) -m pytest -v -s tests/e2e/long_upgrade.py

clean: ## build outputs and results; keeps the Python environment
	cargo clean
	rm -rf results
