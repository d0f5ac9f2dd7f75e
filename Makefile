# make demo    trains the example on MovieLens with two processes
# make test    runs the tests that take seconds; TEST_SLOW=1 runs all
# make build   sets up the environment and builds the extension
# make docs    builds the documentation into build/docs; a warning is an error
# make wheel   builds a wheel for other machines into dist
# make lint    ruff and clang-format
# make clean   removes what was built; .venv and .data stay
#
# Every target sets up what it needs first, and reuses what is already there.
#
# TORCHREC_HKV_PYTHON=python3 uses that Python and its packages as they are, without a virtual
# environment. TORCHREC_HKV_CUDA=0 makes the CPU build on a machine with a GPU. setup.py has more.

# The first Python that is new enough; tools/setup_env.py says so if there is none.
BASE_PYTHON := $(shell \
	for python in $(or $(TORCHREC_HKV_PYTHON),python3 python3.14 python3.13 python3.12 python3.11); do \
		$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
			&& command -v $$python && break; \
	done)
ifeq ($(BASE_PYTHON),)
BASE_PYTHON := python3
endif
ifdef TORCHREC_HKV_PYTHON
PYTHON := $(TORCHREC_HKV_PYTHON)
else
PYTHON := .venv/bin/python
# For ninja and clang-format.
export PATH := $(CURDIR)/.venv/bin:$(PATH)
endif

GPUS := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
ifndef TORCHREC_HKV_CUDA
TORCHREC_HKV_CUDA := $(if $(filter-out 0,$(GPUS)),1,0)
endif
ifndef MAX_JOBS
MAX_JOBS := $(shell nproc)
endif
export TORCHREC_HKV_CUDA MAX_JOBS
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

DEVICE := $(if $(filter 1,$(TORCHREC_HKV_CUDA)),cuda,cpu)
# Two processes; one where they would have to share a GPU.
NPROC := $(if $(filter cuda1,$(DEVICE)$(GPUS)),1,2)
THREADS := $(shell n=$$(($(MAX_JOBS) / $(NPROC))); echo $$((n < 1 ? 1 : n)))
DEMO_ARGS :=
TEST_ARGS :=
TEST_SLOW :=
# Processes that share the tests; more than four would wait for each other's ranks.
TEST_PROCESSES := $(shell n=$(MAX_JOBS); echo $$((n > 4 ? 4 : n)))

CSRC := $(shell find csrc -type f 2>/dev/null)
ENVIRONMENT := build/environment.txt
EXTENSION := build/extension.txt
RECBOLE := recbole-1.2.1
DATA := .data/$(RECBOLE)-py3-none-any.whl

.PHONY: demo test build docs wheel lint clean FORCE

demo: $(EXTENSION) $(DATA)
	OMP_NUM_THREADS=$(THREADS) $(PYTHON) -m torch.distributed.run --standalone --nproc_per_node $(NPROC) \
		examples/train_movielens.py --device $(DEVICE) $(DEMO_ARGS)

test: $(EXTENSION)
	$(PYTHON) -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder $(if $(TEST_SLOW),,-m 'not slow') $(TEST_ARGS)

build: $(EXTENSION)

docs: $(EXTENSION)
	@$(BASE_PYTHON) tools/setup_env.py --record $(ENVIRONMENT) --extra docs
	$(PYTHON) -m sphinx -b html -W --keep-going -q docs build/docs
	@echo "The documentation is in build/docs/index.html"

wheel: $(ENVIRONMENT)
	@$(BASE_PYTHON) tools/setup_env.py --record $(ENVIRONMENT) --extra wheel
	$(PYTHON) tools/build_wheel.py --out dist

lint: $(ENVIRONMENT)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	find csrc examples -name '*.cpp' -o -name '*.cu' -o -name '*.h' -o -name '*.cuh' \
		| xargs -r clang-format --dry-run --Werror

clean:
	rm -rf build dist *.egg-info torchrec_hkv/_C.*.so torchrec_hkv/_v3

# The file changes only when the environment does, so what depends on it is rebuilt only then.
$(ENVIRONMENT): FORCE
	@$(BASE_PYTHON) tools/setup_env.py --record $@

$(EXTENSION): $(ENVIRONMENT) setup.py $(CSRC)
	@echo "Building the extension for $(if $(filter cuda,$(DEVICE)),CUDA and the CPU,the CPU)"
	@$(PYTHON) tools/build_progress.py --log build/extension.log --result 'torchrec_hkv/_C.*.so' \
		-- $(PYTHON) setup.py build_ext --inplace
	@grep -E 'warning:' build/extension.log || true
	@cp $(ENVIRONMENT) $@

# MovieLens-100K lies inside this wheel, which is only read.
$(DATA): | $(ENVIRONMENT)
	@echo "Downloading the MovieLens-100K data"
	@$(PYTHON) -m pip download -qq --disable-pip-version-check --no-deps --dest .data \
		$(subst -,==,$(RECBOLE))
