# A thin wrapper over CMake: each command also installs what it needs (scripts/setup.sh) and says so.

BUILD := build
JOBS := $(shell nproc 2>/dev/null || echo 2)
PREFIX ?= /usr/local

build:
	@bash scripts/setup.sh build
	@bash scripts/build.sh "$(BUILD)" $(JOBS)

demo: build
	@"$(BUILD)/halfstep" demo --out "$(BUILD)/demo"

# The first tier of the tests. The last lines say what it leaves to test-all.
test:
	@bash scripts/test.sh test "$(BUILD)" $(JOBS)

# Every test; CI runs it.
test-all:
	@bash scripts/test.sh all "$(BUILD)" $(JOBS)

# Runs the tests of `make test` under other settings of the machine, one after the other, in about an hour and a half: `make
# test-machines SETTINGS="user german"`, or all. An interrupted run goes on where it was. Prints the table of docs/reliability.md.
SETTINGS ?=
test-machines: build
	@bash scripts/setup.sh machines
	@bash scripts/build.sh "$(BUILD)" $(JOBS) -DHALFSTEP_TESTS=ON -DHALFSTEP_WERROR=ON
	@bash tests/packages/python_package.sh
	@python3 tests/packages/machines.py "$(BUILD)" $(JOBS) $(SETTINGS)

# The test programs under AddressSanitizer and UndefinedBehaviorSanitizer. Part of test-all.
sanitizers: build
	@bash scripts/setup.sh test
	@HALFSTEP_BUILD="$(BUILD)" bash tests/tools/other_build.sh "$(BUILD)/asan" clang --preset asan -DCMAKE_C_COMPILER=clang

# What to run after each change: programs and scripts that are short and the layout of sources, without the Python package and other builds.
check:
	@bash scripts/test.sh check "$(BUILD)" $(JOBS)

# Tests each trainer of docs/frameworks.md with its own packages, and holds the page's table to what they show. WRITE=--write writes
# the table. Not part of test-all: the environments are gigabytes.
test-trainers: build
	@bash scripts/setup.sh test
	@bash scripts/build.sh "$(BUILD)" $(JOBS) -DHALFSTEP_TESTS=ON
	@bash tests/packages/python_package.sh
	@bash scripts/trainers.sh "$(BUILD)" $(WRITE)

# Makes in build/dist what a release has for the Python index: the sdist and a wheel for each row of packaging/platforms.csv. TAGS names
# some of them.
wheels: build
	@bash scripts/setup.sh packages
	@bash packaging/wheels.sh "$(BUILD)" $(TAGS)

# Makes the Debian packages in build/dist, and installs them in a root of their own.
packages: build
	@bash scripts/setup.sh packages
	@bash packaging/debian.sh "$(BUILD)"

# Makes all of it, makes the wheels twice, runs what can be run of each, and holds the table of docs/packaging.md to what was shown.
# WRITE=--write writes the table.
test-packages: wheels
	@bash packaging/run.sh "$(BUILD)"
	@bash packaging/sdist.sh "$(BUILD)"
	@bash packaging/abidiff.sh "$(BUILD)"
	@bash packaging/same.sh "$(BUILD)"
	@$(MAKE) --no-print-directory packages
	@python3 packaging/results.py table "$(BUILD)/packaging/results" $(WRITE)

# Trains with the wheel of this machine in a fresh environment for each of some versions of torch and Python, and resumes across them.
# Downloads gigabytes. WRITE=--write as above.
matrix: build
	@bash scripts/matrix.sh "$(BUILD)" $(TORCH)
	@python3 packaging/results.py table "$(BUILD)/packaging/results" $(WRITE)

# Lays out the C sources, as .clang-format says, and Python, as pyproject.toml says; a test holds them to it.
format:
	@bash scripts/setup.sh test
	@bash scripts/venv.sh "$(BUILD)/venv"
	@PATH="$$(cd "$(BUILD)" && pwd)/venv/bin:$$PATH" bash scripts/format.sh

# Makes the site of the documents in build/site.
docs: build
	@bash scripts/setup.sh test
	@bash scripts/venv.sh "$(BUILD)/venv"
	@HALFSTEP_BUILD="$$(cd "$(BUILD)" && pwd)" bash site/build.sh

# Branches and lines that the tests reach, by folder, and those that they do not.
coverage:
	@bash scripts/setup.sh test
	@bash tests/tools/coverage.sh "$(BUILD)/coverage" $(JOBS)

bench: build
	@"$(BUILD)/halfstep" bench

# Rewrites tests/golden/hashes.txt from the scalar kernels. A changed line is a release note, never an accident.
golden: build
	@HALFSTEP_ISA=scalar "$(BUILD)/halfstep" verify --write tests/golden/hashes.txt

# Rewrites what follows from the tables of rules and formats: golden hashes, the hash that the Python package verifies, its classes, lists in the documents.
generate: golden
	@bash scripts/setup.sh test
	@bash scripts/venv.sh "$(BUILD)/venv"
	@HALFSTEP_LIBRARY="$(BUILD)/libhalfstep.so" "$(BUILD)/venv/bin/python" scripts/generate.py --write

# Rewrites bench/instructions.csv, the most instructions that steps may need, for the compiler of this build. Where `make test`
# has built for the other processor, for that too. Where clang and ptxas can be had, also bench/gpu_kernels.csv.
budgets: build
	@python3 lab/instructions.py "$(BUILD)" --write bench/instructions.csv
	@if [ -e "$(BUILD)/aarch64/CMakeCache.txt" ]; then cmake --build "$(BUILD)/aarch64" --target halfstep --parallel $(JOBS) -- -s && \
	    python3 lab/instructions.py "$(BUILD)/aarch64" --write bench/instructions.csv; fi
	@GPU_BUDGETS=write HALFSTEP_BUILD="$(BUILD)" bash tests/cuda/cuda_ptx_test.sh || [ $$? = 77 ]

# Long statistics of the random bits, for docs/random.md: hours on one core.
GENERATORS ?= philox7 mixer lattice
stats:
	@bash scripts/setup.sh stats
	@for generator in $(GENERATORS); do OUT="$(BUILD)/random" sh tests/core/random_stats.sh $$generator || exit 1; done

# Everything of docs/reliability.md but the fuzzers: every call into the C library fails, a thousand kills, a million steps. About
# an hour on one core; `make test` runs a short choice.
faults:
	@bash scripts/setup.sh build
	@bash scripts/build.sh "$(BUILD)" $(JOBS) -DHALFSTEP_TESTS=UNIT
	@bash scripts/faults.sh "$(BUILD)"

# All fuzz targets for so many minutes in all.
MINUTES ?= 10
fuzz:
	@bash scripts/setup.sh build
	@bash scripts/setup.sh fuzz
	@bash scripts/fuzz.sh "$(BUILD)/fuzz" $(MINUTES)

# Runs again what docs/results.md reports.
experiments: build
	@bash lab/experiments.sh "$(BUILD)"

# CMake gives files a mode of their own, and folders that of the umask.
install: build
	@umask 022 && cmake --install "$(BUILD)" --prefix "$(PREFIX)"

clean:
	@rm -rf "$(BUILD)"

.PHONY: build demo docs test test-all test-machines sanitizers test-trainers wheels packages test-packages matrix check format coverage bench golden generate budgets stats faults fuzz experiments install clean
