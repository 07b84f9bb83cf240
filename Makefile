# The commands a person types; CI types the same (.ci/run).

PYTHON ?= python3
# The PyTorch that `train`, `test` and `lint` use, and those that `compat` covers.
TORCH ?= 2.15
COMPAT ?= 2.15 2.13 2.11
STEPS ?= 250

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SECONDARY:
SHELL := bash
.SHELLFLAGS := -euo pipefail -c

# Ranks share the cores, and a build of one torch must not load with another.
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Of PyTorch's thousands of modules most are never imported: those that are get compiled then, and that is kept. Without what is
# kept, `import torch` takes twice as long, and tests start a thousand interpreters.
PIP_INSTALL := -m pip install --quiet --no-compile
export PYTHONDONTWRITEBYTECODE :=

# The virtual environment of a torch version: .venv for the chosen one.
venv_of = $(if $(filter $(TORCH),$(1)),.venv,.venv-torch$(1))
# Stamps: its packages are there; the wheel of these sources is too. They name the version, which may change in .venv.
ready = $(call venv_of,$(1))/.ready-$(1)
installed = $(call venv_of,$(1))/.installed-$(1)
# Runs a command as if that environment were active.
in_venv = VIRTUAL_ENV="$(CURDIR)/$(1)" PATH="$(CURDIR)/$(1)/bin:$$PATH" PYO3_PYTHON="$(CURDIR)/$(1)/bin/python"
VENV := .venv
IN_VENV = $(call in_venv,$(VENV))

SOURCES := Cargo.toml Cargo.lock build.rs $(wildcard pyproject.toml README.md LICENSE) \
	$(shell find src backend_api device_mesh torch_plugin -type f -not -name '*.so' -not -name '*.pyc')
# Folders count too, so that a deleted file is noticed.
FOLDERS := $(shell find src backend_api device_mesh torch_plugin -type d -not -name __pycache__)

.PHONY: help
help: ## Shows this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

.PHONY: train
train: $(call installed,$(TORCH)) ## Trains one model on ncclx_rs and on gloo, and compares the losses
	$(IN_VENV) python examples/compare_backends.py --backends ncclx_rs gloo --steps $(STEPS) \
		$(if $(filter 250,$(STEPS)),--learned 2.5)

.PHONY: check
check: lint test ## All of lint and test

# The wheel is built for release, mostly by one thread, while the engine's tests run.
.PHONY: test
test: ## Runs the tests of the engine and of the backend
	$(MAKE) --jobs 2 rust-test $(call installed,$(TORCH))
	$(MAKE) stubtest python-test

.PHONY: rust-test
rust-test: ## Runs the engine's tests, also those in its documentation, and checks the models of its lock-free parts
	MAKEFLAGS= cargo test --locked  # cargo would look for the job server of `test`, which recipes do not get

# The feature `tch` fits one version. Its C++ takes minutes to compile, hence this stands apart from `test`. The engine is built
# for it alone, and not optimised.
TCH_TORCH := 2.13
TCH_VENV = $(call venv_of,$(TCH_TORCH))
TCH_CARGO = $(call in_venv,$(TCH_VENV)) LIBTORCH_USE_PYTORCH=1 CARGO_TARGET_DIR="$(CURDIR)/target/tch" CARGO_PROFILE_TEST_OPT_LEVEL=0 \
	LD_LIBRARY_PATH="$$($(TCH_VENV)/bin/python -c 'import torch, os; print(os.path.dirname(torch.__file__))')/lib" \
	cargo

.PHONY: test-tch
test-tch: $(call ready,$(TCH_TORCH)) ## Runs the tests and the example of the Rust interface for tch tensors
	$(TCH_CARGO) clippy --locked --package ncclx_rs --features tch --profile test --lib --test tch --example train_tch -- -D warnings
	$(TCH_CARGO) test --locked --package ncclx_rs --features tch --test tch
	$(TCH_CARGO) test --locked --package ncclx_rs --features tch --doc
	$(TCH_CARGO) run --locked --package ncclx_rs --features tch --profile test --example train_tch

# Every reader of outside bytes gets random ones for so many seconds; what is found lies in target/fuzz. cargo-fuzz
# instruments code by options that compilers of the stable channel take only with RUSTC_BOOTSTRAP.
FUZZ_SECONDS ?= 600
CARGO_FUZZ := target/tools/bin/cargo-fuzz
FUZZ_CARGO = PATH="$(CURDIR)/$(dir $(CARGO_FUZZ)):$$PATH" RUSTC_BOOTSTRAP=1 CARGO_TARGET_DIR="$(CURDIR)/target/fuzz" cargo
FUZZ_OPTIONS = -max_total_time=$(FUZZ_SECONDS) -timeout=60 -max_len=4096

.PHONY: fuzz fuzz-rust fuzz-python
fuzz: fuzz-rust fuzz-python ## Fuzzes what reads bytes from outside, for FUZZ_SECONDS each
fuzz-rust: $(CARGO_FUZZ)
	for target in $$($(FUZZ_CARGO) fuzz list --fuzz-dir tests/fuzz); do \
		mkdir -p target/fuzz/corpus/$$target; \
		$(FUZZ_CARGO) fuzz run --fuzz-dir tests/fuzz $$target target/fuzz/corpus/$$target tests/fuzz/corpus/$$target \
			-- $(FUZZ_OPTIONS) -malloc_limit_mb=100; \
	done
fuzz-python: $(call installed,$(TORCH))
	$(VENV)/bin/python $(PIP_INSTALL) atheris
	for target in dumps init_handles; do \
		mkdir -p target/fuzz/corpus/$$target; \
		$(IN_VENV) python tests/fuzz/targets.py $$target target/fuzz/corpus/$$target tests/fuzz/corpus/$$target \
			$(FUZZ_OPTIONS) -artifact_prefix=target/fuzz/; \
	done
$(CARGO_FUZZ):
	cargo install --quiet --locked --root target/tools cargo-fuzz@0.13.2

.PHONY: models
models: ## Checks every interleaving of the lock-free parts
	cargo test --locked --package ncclx_rs_models

# What looks for undefined behaviour and for data races takes a nightly compiler and the standard library's sources.
NIGHTLY ?= nightly
NIGHTLY_CARGO = cargo +$(NIGHTLY)
.PHONY: nightly-toolchain
nightly-toolchain:
	rustup toolchain install $(NIGHTLY) --profile minimal --component miri,rust-src

# Miri knows no shared mappings, no forks and few socket options, so it runs what works on callers' memory and on a
# connection made by hand, and the boundary to backends' libraries. Skipped is what takes it minutes or looks at the clock.
MIRI_TESTS := engine:: window:: transport::auth comm::store::protocol comm::failure_detector::notice sys::poller
MIRI_SKIPS := a_copy_takes_no_more is_given_credit_for what_is_unread_fills plans_are_kept callbacks half_precision \
	combine_and_fold in_either_order sender_has_the_time is_blamed_soon what_has_to_wait is_written_down_once \
	among_thousands takes_several_turns a_tenth_more
MIRI = PROPTEST_CASES=3 MIRIFLAGS=-Zmiri-disable-isolation RUSTFLAGS="--cfg rustix_use_libc" \
	CARGO_TARGET_DIR=target/miri $(NIGHTLY_CARGO) miri test --locked
.PHONY: miri
miri: nightly-toolchain ## Looks for undefined behaviour in what Miri can run
	$(MIRI) --package ncclx_rs_backend --tests
	$(MIRI) --package ncclx_rs --lib -- $(MIRI_TESTS) $(MIRI_SKIPS:%=--skip %)

# One test at a time, and the ranks of each in threads: they are slow enough as it is. Skipped is what has no threads and
# takes many minutes, what has cargo build examples, which would get no standard library with the sanitizer, and what has NVRTC
# load a library of its own, which the system looks for beside whoever loads it: that is the sanitizer then. System calls go
# through libc, where the sanitizer sees them: it would take memory that is mapped anew for what lay there before.
TSAN_SKIPS := schedules::every_algorithm_is_right_in_larger_worlds programs::programs_of examples:: nvrtc::
.PHONY: tsan
tsan: nightly-toolchain ## Looks for data races with ThreadSanitizer
	PROPTEST_CASES=8 RUSTFLAGS="-Zsanitizer=thread --cfg rustix_use_libc" CARGO_TARGET_DIR=target/tsan \
		TSAN_OPTIONS="suppressions=$(CURDIR)/tests/tsan.supp" \
		$(NIGHTLY_CARGO) test --locked -Zbuild-std --target x86_64-unknown-linux-gnu --package ncclx_rs \
		--lib --test engine -- --test-threads 1 $(TSAN_SKIPS:%=--skip %)

# Programs that run on the backend: hundreds of megabytes, hence only where they are tested.
PROGRAMS := $(VENV)/.programs
$(PROGRAMS): requirements-programs.txt $(call ready,$(TORCH))
	$(VENV)/bin/python $(PIP_INSTALL) -r requirements-programs.txt
	touch $@

# They mostly wait, so parts of them run beside each other; after these come those that compare times.
PYTHON_PARTS := $(addprefix python-test-,programs faults worlds alone)
.PHONY: python-test $(PYTHON_PARTS)
python-test: $(call installed,$(TORCH)) $(PROGRAMS) ## Runs the tests of the PyTorch backend
	$(MAKE) --jobs 3 --output-sync $(filter-out python-test-alone,$(PYTHON_PARTS))
	$(MAKE) python-test-alone
$(PYTHON_PARTS): python-test-%: $(call installed,$(TORCH)) $(PROGRAMS)
	MAKEFLAGS= $(IN_VENV) python -m pytest tests/python --part $*

# The smoke tests on a build that takes seconds, beside what `test` has installed. Such a build is not to be the fastest.
QUICK_SITE := target/quick/site
.PHONY: quick
quick: $(call ready,$(TORCH)) ## Runs the smoke tests on an unoptimised build
	rm -rf $(QUICK_SITE)
	$(IN_VENV) CARGO_TARGET_DIR="$(CURDIR)/target/quick" MATURIN_PEP517_ARGS="--profile dev" \
		pip install --quiet --no-build-isolation --no-deps --target $(QUICK_SITE) .
	$(IN_VENV) PYTHONPATH="$(CURDIR)/$(QUICK_SITE)" python -m pytest tests/python -m "smoke and not slow" \
		-k "not beats_gloo"

# CUDA without a GPU: tests/softcuda/README.md.
softcuda_of = $(CURDIR)/target/softcuda/$(1)
SOFTCUDA := $(call softcuda_of,$(TORCH))
IN_SOFTCUDA = $(IN_VENV) SOFTCUDA_HOME="$(SOFTCUDA)" tests/softcuda/run
CUDA_PARTS := python-test-cuda rust-test-cuda acceptance-cuda softcuda-test example-cuda
.PHONY: softcuda test-cuda $(CUDA_PARTS)
softcuda: softcuda-$(TORCH) ## Builds the software CUDA for tests

# The longest ones come first, so that two that run beside each other end at about the same time.
test-cuda: softcuda $(call installed,$(TORCH)) $(PROGRAMS) ## Runs the tests of CUDA tensors, on a software CUDA
	$(MAKE) --jobs 2 --output-sync $(CUDA_PARTS)
softcuda-test: softcuda
	MAKEFLAGS= $(IN_SOFTCUDA) python -m pytest tests/softcuda/tests

# PyTorch's own suite (docs/acceptance.md).
ACCEPTANCE_SIZES := 2 3 4
.PHONY: acceptance $(ACCEPTANCE_SIZES:%=acceptance-%)
acceptance: $(ACCEPTANCE_SIZES:%=acceptance-%) ## Runs PyTorch's own tests for backends with two, three and four ranks
$(ACCEPTANCE_SIZES:%=acceptance-%): acceptance-%: $(call installed,$(TORCH))
	$(IN_VENV) EXTRA=1 BACKEND=ncclx_rs WORLD_SIZE=$* python -m pytest --quiet --timeout 300 tests/acceptance

# The engine's tests of CUDA. What `test-cuda` has built is preloaded into them, and not into the compiler.
CUDA_TWINS = $(SOFTCUDA)/twins.so
KERNEL_TWINS = $(SOFTCUDA)/kernels.so
AS_TWINS = $(CXX) -x c++ -std=c++17 -O1 -ffp-contract=off -shared -fPIC -Itests/softcuda/include
$(call softcuda_of,%)/kernels.so: src/device/kernels.cu $(wildcard tests/softcuda/include/*.h) | softcuda-%
	mkdir -p $(@D)
	$(AS_TWINS) $< -o $@
$(CUDA_TWINS): tests/softcuda/tests/sample.cu $(wildcard tests/softcuda/include/*.h) | softcuda
	$(AS_TWINS) $< -o $@
# The compiler of kernels lies in a folder that PyTorch's wheel brings, which a program without PyTorch has to be told.
FOR_RUST_CUDA = LD_LIBRARY_PATH="$$(echo $(CURDIR)/$(VENV)/lib/python*/site-packages/nvidia/cu13/lib)" \
	SOFTCUDA_HOME="$(SOFTCUDA)" SOFTCUDA_TWINS="$(CUDA_TWINS):$(KERNEL_TWINS)" NCCLX_RS_TEST_CUDA=1
rust-test-cuda: softcuda $(KERNEL_TWINS) $(CUDA_TWINS)
	MAKEFLAGS= $(FOR_RUST_CUDA) cargo test --locked --test cuda \
		--config "target.'cfg(all())'.runner = '$(CURDIR)/tests/softcuda/run'" -- $(CUDA_TEST_NAMES)

# The Rust interface without Python: both ranks come to the same line.
example-cuda: softcuda $(KERNEL_TWINS) $(CUDA_TWINS)
	MAKEFLAGS= $(FOR_RUST_CUDA) cargo run --quiet --locked --profile test --example all_reduce_cuda \
		--config "target.'cfg(all())'.runner = '$(CURDIR)/tests/softcuda/run'" | grep --count "of 2: y = 3.000 x + 1.000" | grep -qx 2

# Its races, under many seeds.
.PHONY: races-cuda
races-cuda: export NCCLX_RS_RACE_SEEDS := $(or $(SEEDS),1000)
races-cuda: export NCCLX_RS_RACE_SEED := $(or $(SEED),1)
races-cuda: CUDA_TEST_NAMES := races
races-cuda: rust-test-cuda

# What those tests are worth: each mutation of the engine must fail one.
.PHONY: mutations-cuda
mutations-cuda: softcuda $(KERNEL_TWINS) $(CUDA_TWINS) ## Breaks the engine of streams in many ways, and sees that its tests notice
	$(IN_VENV) $(FOR_RUST_CUDA) python tests/mutations/run_mutations.py $(MUTATIONS)

# Whatever can be combined, as seeds draw it.
.PHONY: samples-cuda
samples-cuda: export NCCLX_RS_SAMPLES := $(or $(SAMPLES),1000)
samples-cuda: export NCCLX_RS_SAMPLE := $(or $(SEED),1)
samples-cuda: CUDA_TEST_NAMES := product
samples-cuda: rust-test-cuda

# Those of the PyTorch backend.
PYTHON_CUDA = MAKEFLAGS= SOFTCUDA_TWINS="$(KERNEL_TWINS)" $(IN_SOFTCUDA) python -m pytest
CUDA_INSTALLED := softcuda $(KERNEL_TWINS) $(call installed,$(TORCH))
python-test-cuda: $(CUDA_INSTALLED) $(PROGRAMS)
	$(PYTHON_CUDA) tests/cuda_python

# The same programs on AMD's functions.
.PHONY: hip
hip: export SOFTCUDA_PROVIDER := hip
hip: export SOFTHIP_WAITS := 1
hip: export NCCLX_RS_ENGINE := streams
hip: CUDA_TEST_NAMES := lanes rings messages:: graphs:: hosts:: windows:: --skip vendor_
hip: rust-test-cuda $(CUDA_INSTALLED) ## Runs the engine's programs for streams, and tests of PyTorch, on a software HIP
	$(PYTHON_CUDA) tests/cuda_python -m smoke

# PyTorch's own tests of CUDA tensors.
acceptance-cuda: $(CUDA_INSTALLED)
	BACKEND=ncclx_rs WORLD_SIZE=2 SOFTCUDA_DEVICES=2 $(PYTHON_CUDA) --quiet --timeout 300 tests/acceptance

# Long versions of two tests.
.PHONY: chaos-cuda soak-cuda
chaos-cuda: $(CUDA_INSTALLED)
	NCCLX_RS_CHAOS_FAULTS=$(or $(FAULTS),200) NCCLX_RS_CHAOS_SEED=$(or $(SEED),1) $(PYTHON_CUDA) \
		tests/cuda_python/test_cuda_chaos.py
soak-cuda: $(CUDA_INSTALLED)
	NCCLX_RS_SOAK_CUDA=10 NCCLX_RS_TEST_WATCHDOG=1800 $(PYTHON_CUDA) --timeout 2000 \
		tests/cuda_python/test_cuda_footprint.py

# On a GPU: tests/gpu/README.md. `cargo` tells where it has put the program of the tests.
.PHONY: gpu try-gpu
CUDA_TESTS = "$$(cargo test --locked --test cuda --no-run 2>&1 | tee /dev/stderr | sed -n 's/.*(\(.*\))$$/\1/p' | tail -1)"
# The compiler of kernels, as for rust-test-cuda.
WITH_NVRTC = LD_LIBRARY_PATH="$$(echo $(CURDIR)/$(VENV)/lib/python*/site-packages/nvidia/cu13/lib):$$LD_LIBRARY_PATH"
gpu: export LD_LIBRARY_PATH ?=
gpu: $(call installed,$(TORCH)) ## Runs probes, benchmarks and tests on a GPU, and writes a report
	program=$(CUDA_TESTS); $(IN_VENV) $(WITH_NVRTC) python tests/gpu/run_gpu.py --report target/gpu --rust "$$program" $(GPU_OPTIONS)

PROBE_TWINS = $(SOFTCUDA)/probes.so
$(PROBE_TWINS): tests/gpu/probe.cu $(wildcard tests/softcuda/include/*.h) | softcuda
	$(AS_TWINS) $< -o $@
try-gpu: export LD_LIBRARY_PATH ?=
try-gpu: $(CUDA_INSTALLED) $(CUDA_TWINS) $(PROBE_TWINS) ## Tries `make gpu` out on the software CUDA
	program=$(CUDA_TESTS); $(WITH_NVRTC) SOFTCUDA_TWINS="$(CUDA_TWINS):$(KERNEL_TWINS):$(PROBE_TWINS)" SOFTCUDA_DEVICES=1 \
		$(IN_SOFTCUDA) python tests/gpu/run_gpu.py --report target/try-gpu --rust "$$program" $(GPU_OPTIONS)

# For a machine with another PyTorch and no compiler. Without a Python 3.12 it is for that of PYTHON.
GPU_TORCH ?= 2.11
GPU_PYTHON ?= $(or $(shell python3.12 -c 'print("python3.12")' 2>/dev/null),$(PYTHON))
GPU_PROFILE ?= release
GPU_VENV := .venv-gpu
GPU_WHEEL := target/gpu-bundle/wheel
$(GPU_VENV)/.ready-$(GPU_TORCH):
	$(GPU_PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python $(PIP_INSTALL) "torch==$(GPU_TORCH).*" "$$(grep maturin requirements-dev.txt)"
	touch $@
.PHONY: gpu-bundle
gpu-bundle: $(GPU_VENV)/.ready-$(GPU_TORCH) ## Packs what `gpu` runs, for a machine without network; GPU_TORCH and GPU_PYTHON say for which
	rm -rf $(GPU_WHEEL)
	$(call in_venv,$(GPU_VENV)) MATURIN_PEP517_ARGS="--profile $(GPU_PROFILE)" \
		pip wheel --quiet --no-build-isolation --no-deps --wheel-dir $(GPU_WHEEL) .
	program=$(CUDA_TESTS); tests/gpu/bundle.sh target/gpu-bundle/ncclx-rs-gpu.tar.gz $(GPU_VENV)/bin/python \
		$(GPU_WHEEL)/*.whl "$$program"

# The archive, unpacked in an empty folder, on the software CUDA: beside that it has only its own and the PyTorch of GPU_VENV.
GPU_SOFTCUDA := $(CURDIR)/target/gpu-bundle/softcuda
GPU_TRIAL := $(CURDIR)/target/gpu-bundle/trial
.PHONY: try-gpu-bundle
try-gpu-bundle: gpu-bundle ## Tries the archive of `make gpu-bundle` out on the software CUDA
	$(MAKE) --silent -C tests/softcuda PYTHON="$(CURDIR)/$(GPU_VENV)/bin/python" OUT="$(GPU_SOFTCUDA)"
	$(MAKE) --silent -C tests/fakenccl PYTHON="$(CURDIR)/$(GPU_VENV)/bin/python" SOFTCUDA="$(GPU_SOFTCUDA)"
	$(AS_TWINS) src/device/kernels.cu -o $(GPU_SOFTCUDA)/kernels.so
	$(AS_TWINS) tests/softcuda/tests/sample.cu -o $(GPU_SOFTCUDA)/twins.so
	$(AS_TWINS) tests/gpu/probe.cu -o $(GPU_SOFTCUDA)/probes.so
	rm -rf $(GPU_TRIAL)
	mkdir -p $(GPU_TRIAL)
	tar --extract --file target/gpu-bundle/ncclx-rs-gpu.tar.gz --directory $(GPU_TRIAL)
	cd $(GPU_TRIAL)/ncclx-rs-gpu && PYTHON="$(CURDIR)/$(GPU_VENV)/bin/python" SOFTCUDA_HOME="$(GPU_SOFTCUDA)" SOFTCUDA_DEVICES=1 \
		SOFTCUDA_TWINS="$(GPU_SOFTCUDA)/twins.so:$(GPU_SOFTCUDA)/kernels.so:$(GPU_SOFTCUDA)/probes.so" \
		tests/softcuda/run ./run.sh $(GPU_OPTIONS)

# The wheel for every PyTorch and Python: docs/packaging.md. SHIMS names some pairs of them (2.15:3.11), or `here` those whose
# Python is installed, and PYTHON_HEADERS the headers of a Python that is not (3.14=FOLDER).
MACHINE ?= $(shell uname -m)
DIST ?= dist
WHEEL_TOOLS := target/wheels/venv
IN_WHEEL_TOOLS = PATH="$(CURDIR)/$(WHEEL_TOOLS)/bin:$$PATH" python
$(WHEEL_TOOLS)/.ready: packaging/requirements.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP_INSTALL) -r packaging/requirements.txt
	touch $@

.PHONY: wheels sdist
wheels: $(WHEEL_TOOLS)/.ready ## Builds the wheel for every PyTorch and Python into dist/, or DIST
	$(IN_WHEEL_TOOLS) packaging/wheels.py --machine $(MACHINE) --out $(DIST) \
		$(if $(SHIMS),$(if $(filter here,$(SHIMS)),--here,--shims $(SHIMS))) \
		$(if $(PYTHON_HEADERS),--headers $(PYTHON_HEADERS)) $(if $(PROFILE),--profile $(PROFILE))
# In a fresh environment for each PyTorch and Python that this machine has; PAIRS names some (2.15:3.11), and TORCH_INDEX the
# package index of another build of PyTorch, such as that without CUDA.
.PHONY: check-wheels
check-wheels: ## Tries the wheels of dist/ with every PyTorch and Python that this machine has
	$(PYTHON) packaging/check_wheels.py --dist $(DIST) $(if $(PAIRS),--pairs $(PAIRS)) $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX))
sdist: $(WHEEL_TOOLS)/.ready ## Builds the source distribution into dist/
	$(IN_WHEEL_TOOLS) -m maturin sdist --out $(DIST)

# One wheel for all that this machine can have, tried with each: those of dist/ stay as they are.
.PHONY: all-wheels
all-wheels:
	$(MAKE) wheels SHIMS=here DIST=target/nightly
	$(MAKE) check-wheels DIST=target/nightly

.PHONY: package
package: ## Packs the engine's crate, and builds it from what is packed
	cargo package --locked --package ncclx_rs $(if $(DIRTY),--allow-dirty)

# The site of the documentation, in target/docs/site: docs/, the docstrings and rustdoc's pages. The crate's pages are
# those of its interface; `lint` looks at the rest of its documentation.
DOCS_VENV := target/docs/venv
$(DOCS_VENV)/.ready: packaging/docs-requirements.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP_INSTALL) -r packaging/docs-requirements.txt
	touch $@
.PHONY: docs
docs: $(DOCS_VENV)/.ready ## Builds the documentation's site into target/docs/site, and checks its links
	RUSTDOCFLAGS="-D warnings -A rustdoc::private-intra-doc-links" \
		cargo doc --locked --package ncclx_rs --package ncclx_rs_backend --no-deps --quiet --target-dir target/docs
	NO_MKDOCS_2_WARNING=1 NCCLX_RS_RUSTDOC="$(CURDIR)/target/docs/doc" $(DOCS_VENV)/bin/mkdocs build

.PHONY: screenshots
screenshots: docs ## Photographs the site's main pages in a headless browser, into target/docs/screenshots
	$(PYTHON) packaging/screenshots.py

.PHONY: nightly
nightly: ## Runs what takes too long for CI: acceptance, chaos with a new seed, soak, miri, tsan, fuzz and all wheels
	seed=$(or $(SEED),$$(date +%s)); echo "SEED=$$seed"; \
		$(MAKE) --keep-going acceptance compat-$(TCH_TORCH) every-world long-messages scale scale-thousands simulated-times \
			instructions-by-default nccl-versions chaos chaos-cuda races-cuda samples-cuda mutations-cuda hip soak soak-cuda miri tsan fuzz package all-wheels SEED=$$seed

# Worlds of real ranks, 64 to a process.
SCALE ?= 256 1024
.PHONY: scale
scale: ## Starts worlds of hundreds of ranks on this machine: SCALE lists other sizes
	NCCLX_RS_SCALE="$(SCALE)" cargo test --locked --package ncclx_rs --test scale -- --nocapture

# 4,096 of them, which takes 20 GB, and more TCP ports than Linux gives by itself: in a network of their own, as root.
.PHONY: scale-thousands
scale-thousands:
	cargo test --locked --package ncclx_rs --test scale --no-run
	unshare --net sh -c 'ip link set lo up && sysctl --quiet --write net.ipv4.ip_local_port_range="10000 65535" && \
		$(MAKE) scale SCALE=4096'

.PHONY: every-world
every-world: export NCCLX_RS_EVERY_WORLD := 1
every-world: python-test ## Runs the tests of the PyTorch backend over each transport in worlds of each size

.PHONY: long-messages
long-messages: $(call installed,$(TORCH))
	$(IN_VENV) NCCLX_RS_LARGE=1 python -m pytest tests/python/test_surroundings.py -k four_gib

# What a simulation says beside what is measured, which other work on the machine would change.
.PHONY: simulated-times
simulated-times: $(call installed,$(TORCH))
	$(IN_VENV) NCCLX_RS_QUIET=1 python -m pytest tests/python/test_simulate.py -k as_those_measured

# What is known of the versions of NCCL, which are 200 MB each.
NCCL_VERSIONS := 2.27.7 2.28.9 2.29.7 2.30.7 2.31.2 2.32.3
NCCL_FILES := $(NCCL_VERSIONS:%=target/nccl/%/.unpacked)
$(NCCL_FILES): target/nccl/%/.unpacked: | $(call ready,$(TORCH))
	$(VENV)/bin/python $(PIP_INSTALL) --no-deps --target target/nccl/$* nvidia-nccl-cu13==$*
	touch $@
.PHONY: nccl-versions
nccl-versions: $(call installed,$(TORCH)) $(NCCL_FILES) ## Tests what the engine knows of each version of NCCL
	$(IN_VENV) NCCLX_RS_TEST_NCCL="$(CURDIR)/target/nccl" python -m pytest tests/python/test_info.py

# Long versions of two tests.
.PHONY: chaos
chaos: $(call installed,$(TORCH)) ## Makes 1,000 random faults: FAULTS and SEED change that
	$(IN_VENV) NCCLX_RS_CHAOS_FAULTS=$(or $(FAULTS),1000) NCCLX_RS_CHAOS_SEED=$(or $(SEED),1) \
		NCCLX_RS_TEST_WATCHDOG=300 python -m pytest tests/python/test_chaos.py --timeout 900

.PHONY: soak
soak: ## Runs a million mixed operations, and watches memory, file descriptors and threads
	NCCLX_RS_SOAK_OPERATIONS=$(or $(OPERATIONS),1000000) cargo test --locked --test process soak -- --nocapture

# The engine in it is that of the wheel, built once.
.PHONY: instructions instructions-by-default
instructions: $(call installed,$(TORCH)) ## Counts the instructions of hot paths against bounds; UPDATE=1 sets these
	$(IN_VENV) python tests/bench/instructions.py $(if $(UPDATE),--update)
instructions-by-default: $(call ready,$(TORCH))
	$(IN_VENV) python tests/bench/instructions.py --by-default $(if $(UPDATE),--update)

# What reads the workflows, in an environment of its own.
WORKFLOW_LINT := target/lint
$(WORKFLOW_LINT)/.ready: tests/lint/requirements.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP_INSTALL) -r tests/lint/requirements.txt
	touch $@
.PHONY: lint-workflows
lint-workflows: $(WORKFLOW_LINT)/.ready
	$(WORKFLOW_LINT)/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(WORKFLOW_LINT)/bin/zizmor --quiet --offline --config .github/zizmor.yml .github/workflows

# Tests that read sources and need nothing built: a mutation that does not apply shows at once, not after all builds.
SOURCE_TESTS := tests/python/test_mutations.py tests/python/test_tidy.py
.PHONY: lint
lint: export NCCLX_RS_CHECK_ONLY := 1
lint: lint-workflows $(call ready,$(TORCH)) ## Checks formats, lints, types, licences and workflows
	cargo fmt --all --check
	$(IN_VENV) cargo clippy --locked --workspace --profile test --all-targets -- -D warnings
	$(IN_VENV) RUSTDOCFLAGS="-D warnings -A rustdoc::private-intra-doc-links" cargo doc --locked --workspace --profile test --no-deps --quiet
	cargo metadata --locked --format-version 1 | $(VENV)/bin/python tests/lint/licences.py
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy torch_plugin/python tests/lint tests/bench tests/mutations packaging
	$(VENV)/bin/python -m pytest --quiet --noconftest $(SOURCE_TESTS)

.PHONY: stubtest
stubtest: $(call installed,$(TORCH)) ## Compares the stubs with the built extension
	$(IN_VENV) python tests/lint/stubs.py

.PHONY: format
format: $(call ready,$(TORCH)) ## Rewrites sources in the house format
	cargo fmt --all
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

.PHONY: compat
compat: $(foreach version,$(COMPAT),compat-$(version)) ## Builds for each PyTorch of COMPAT and runs the smoke tests

# Which tests those are.
SMOKE := smoke

# For scripts: the version that `test-tch` uses, and what `compat` covers beside that and the one of `test`.
.PHONY: tch-version other-versions
tch-version:
	@echo $(TCH_TORCH)
other-versions:
	@echo $(filter-out $(TORCH) $(TCH_TORCH),$(COMPAT))

.PHONY: clean
clean: ## Removes environments and builds
	rm -rf .venv .venv-torch* $(GPU_VENV) target .pytest_cache .mypy_cache .ruff_cache

# Everything for one torch version: its environment, its build of the wheel, its software CUDA, its smoke tests. All but the
# extension itself is built once for all.
define for_torch
.PHONY: wheel-$(1) compat-$(1) compat-cpu-$(1)
wheel-$(1): $(call installed,$(1))
compat-cpu-$(1): $(call installed,$(1))
	$$(call in_venv,$(call venv_of,$(1))) python -m pytest tests/python -m "$$(SMOKE)"
compat-$(1): compat-cpu-$(1) $(call softcuda_of,$(1))/kernels.so
	if [[ -e $(call softcuda_of,$(1))/libcuda.so.1 ]]; then \
		$$(call in_venv,$(call venv_of,$(1))) SOFTCUDA_HOME="$(call softcuda_of,$(1))" \
			SOFTCUDA_TWINS="$(call softcuda_of,$(1))/kernels.so" tests/softcuda/run python -m pytest tests/cuda_python -m "$$(SMOKE)"; \
	else \
		echo "not tested: CUDA tensors, since this PyTorch $(1) is not for CUDA 13"; \
	fi

# The software CUDA is made for what this version's libraries import.
.PHONY: softcuda-$(1)
softcuda-$(1): $(call ready,$(1))
	$(MAKE) --silent -C tests/softcuda PYTHON="$(CURDIR)/$(call venv_of,$(1))/bin/python" OUT="$(call softcuda_of,$(1))"
	$(MAKE) --silent -C tests/fakenccl PYTHON="$(CURDIR)/$(call venv_of,$(1))/bin/python" SOFTCUDA="$(call softcuda_of,$(1))"

.PHONY: drop-$(1)
drop-$(1):
	rm -rf $(call venv_of,$(1)) $(call softcuda_of,$(1)) $(if $(filter $(TCH_TORCH),$(1)),target/tch)

$(call ready,$(1)): requirements-dev.txt
	test -x $$(@D)/bin/python || $(PYTHON) -m venv $$(@D)
	rm -f $$(@D)/.ready-* $$(@D)/.installed-*
	$$(@D)/bin/python $(PIP_INSTALL) --upgrade pip
	$$(@D)/bin/python $(PIP_INSTALL) "torch==$(1).*" -r requirements-dev.txt
	touch $$@

$(call installed,$(1)): $(call ready,$(1)) $(SOURCES) $(FOLDERS)
	$$(call in_venv,$$(@D)) pip install --no-build-isolation --no-deps --force-reinstall .
	touch $$@
endef

$(foreach version,$(sort $(TORCH) $(COMPAT)),$(eval $(call for_torch,$(version))))
