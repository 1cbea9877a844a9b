# Everything runs in .venv, made from requirements.txt (pinned and hashed), with nothing installed
# before but python3, venv, make and a C compiler.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Three on two cores: tests wait, and five compete for the cores (`make test` took 333 s, and 231 s with three).
PYTEST_WORKERS ?= 3
# Some images set it: each of the processes that tests start would compile all of our modules anew.
unexport PYTHONDONTWRITEBYTECODE
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs
# What is built once and kept: the simulated driver, and CRIU.
CACHE := $(CURDIR)/.cache

.PHONY: demo prepared test test-long criu foreign-client axe check bench bench-fleet bench-beside faults chaos shared strategies gpu-kit dist sbom protos client docs lock clean

$(VENV)/.installed: requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

# With KEEP=1 the fleet keeps running, with its web page.
demo: $(VENV)/.installed
	$(BIN)/leasehold demo $(if $(KEEP),--keep)

prepared: $(VENV)/.installed
	@XDG_CACHE_HOME="$(CACHE)" $(BIN)/leasehold simgpu build >/dev/null
	@$(BIN)/python -m compileall -q worker coordinator client web simgpu protos/gen

test: prepared
	$(BIN)/pytest -n $(PYTEST_WORKERS) --dist worksteal $(PYTEST_ARGS)

# What takes long, and samples of what is too large to play whole: other ones each day, by a seed that is printed.
# The same samples again: make test-long LEASEHOLD_TEST_SEED=20000.
test-long: prepared
	$(BIN)/pytest -n $(PYTEST_WORKERS) --dist worksteal -m long $(PYTEST_ARGS)

# The CRIU that tests use. Root, on Debian.
criu:
	.ci/criu

# The libraries of the Node client that tests use.
foreign-client:
	.ci/npm-install tests/coordinator/foreign_client foreign_client

# axe-core, with which tests examine the accessibility of the web page.
axe:
	.ci/npm-install tests/web/axe axe

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint protos
	$(BIN)/buf format protos --diff --exit-code
	.ci/breaking
	$(BIN)/python protos/generate.py --check
	$(BIN)/python client/generate.py --check
	$(MKDOCS) build --quiet

bench: $(VENV)/.installed
	$(BIN)/python -m bench.checked -m bench.command_latency
	$(BIN)/python -m bench.checked -m bench.attack_latency
	$(BIN)/python -m bench.checked -m bench.cli_start
	$(BIN)/python -m bench.checked -m bench.operation_overhead
	$(BIN)/python -m bench.checked -m bench.coordinator_restart
	$(BIN)/python -m bench.checked -m bench.pool
	$(BIN)/python -m bench.checked -m bench.fleet --workers 1000
	$(BIN)/python -m bench.checked -m bench.fleet --workers 100 --clients 64
	$(BIN)/python -m bench.checked -m bench.memory --seconds 120
	$(BIN)/python -m bench.checked -m bench.strategies

# All sizes of fleets, up to 10,000 workers, over TLS and without: about 20 minutes, of which 10,000 take 11.
bench-fleet: $(VENV)/.installed
	$(BIN)/python -m bench.checked -m bench.fleet

# The latency of a command and commands per second, of an older commit and of this one, with the ratios:
# make bench-beside COMMIT=a9aea06.
COMMIT ?= HEAD
bench-beside: $(VENV)/.installed
	$(BIN)/python -m bench.comparison $(COMMIT) -m bench.command_latency
	$(BIN)/python -m bench.comparison $(COMMIT) -m bench.fleet --workers 100 --clients 64

# The whole grid and some sequences: make faults N=12000.
N ?= 300
faults: $(VENV)/.installed
	$(BIN)/leasehold simgpu build
	$(BIN)/python -m tests.faults.runner --cases $(N)

# Commands that are asked for while everything breaks: make chaos N=1000. Root makes network namespaces too.
chaos: N = 200
chaos: $(VENV)/.installed
	$(BIN)/leasehold simgpu build
	$(BIN)/python -m tests.chaos.runner --commands $(N)

# Two users' exec, runs, claims, adopted processes and helpers share four simulated GPUs: make shared N=1000.
shared: N = 200
shared: $(VENV)/.installed
	$(BIN)/leasehold simgpu build
	$(BIN)/python -m tests.chaos.shared_runner --steps $(N)

# Everything that can go wrong while workloads are parked and woken by each policy; images need root and criu.
# Some of it, as one that failed: make strategies MATCH='checkpoint up: kill'.
MATCH ?=
strategies: $(VENV)/.installed
	$(BIN)/leasehold simgpu build
	$(BIN)/python -m tests.integration.strategy_runner --match '$(MATCH)'

# One archive that reports how Leasehold works on a GPU host without network: make gpu-kit PY=3.12. The default
# is the Python of .venv.
PY ?=
gpu-kit: $(VENV)/.installed
	$(BIN)/python tests/gpu/kit.py $(if $(PY),--python $(PY))

# The wheel and the sdist, the same bytes for the same commit: with the commit's time, and no mode of this checkout.
dist: $(VENV)/.installed
	umask 022; SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m hatchling build -d dist
	cd dist && sha256sum *

# The software bill of materials of each extra (CycloneDX), of an environment that is made from its lock.
sbom:
	mkdir -p dist
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) .ci/extras dist

protos: $(VENV)/.installed
	$(BIN)/buf format protos --write
	$(BIN)/python protos/generate.py

# The documentation as a site, with the reference of the Python client: at http://127.0.0.1:8000
docs: $(VENV)/.installed
	$(MKDOCS) serve

# The synchronous client, from the asynchronous one.
client: $(VENV)/.installed
	$(BIN)/python client/generate.py

# The locks name no host: uv writes none, and pip asks whichever index it is set up with. Each lock of an extra has
# the pins of requirements.txt; build.txt has what builds the package from a checkout.
UV_LOCK := uv pip compile --universal --python-version 3.11 --generate-hashes --no-header --no-annotate --quiet
EXTRAS := client coordinator worker web tracing
lock:
	$(UV_LOCK) pyproject.toml --extra dev --upgrade --output-file requirements.txt
	mkdir -p requirements
	for extra in $(EXTRAS); do \
		$(UV_LOCK) pyproject.toml --extra $$extra --upgrade --constraint requirements.txt \
			--output-file requirements/$$extra.txt || exit; \
	done
	$(PYTHON) -c "import tomllib; from pathlib import Path; \
		print(*tomllib.loads(Path('pyproject.toml').read_text())['build-system']['requires'], sep='\n')" | \
		$(UV_LOCK) - --upgrade --constraint requirements.txt --output-file requirements/build.txt
	$(UV_LOCK) --group sbom --upgrade --output-file requirements/sbom.txt

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
