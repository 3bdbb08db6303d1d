# make env, make test, make grade: see README.md. TORCH=keep leaves an installed torch alone (Colab, a cluster).
VENV ?= .venv
PY := $(VENV)/bin/python
PYTHON ?= python3
EXTRAS ?= grader,dev,notebooks

# Otherwise each process would compile all of torch again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: env test stages kit checks test-docs test-slurm handout pdf grade mutants hostile soak survival lint bench gpu clean sandbox

# A module is compiled when it is first imported, not all 10,000 at once: half of the time.
env: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("expected Python 3.11 or newer, got %d.%d: make env PYTHON=python3.12" % v[:2])'
	@echo "creating $(VENV) (a few minutes the first time)"
ifeq ($(TORCH),keep)
	@$(PYTHON) -m venv --system-site-packages $(VENV)
	@$(PYTHON) -c 'from importlib.util import find_spec; kept = [n for n in ("torch", "triton") if find_spec(n)]; print(*(line for line in open("constraints.txt") if line.partition("==")[0] not in kept), sep="", end="")' > $(VENV)/constraints.txt
else
	@$(PYTHON) -m venv $(VENV)
	@cp constraints.txt $(VENV)/constraints.txt
	@$(PY) -m pip install --no-compile --progress-bar on -q -c $(VENV)/constraints.txt torch triton
endif
	@$(PY) -m pip install --no-compile --progress-bar on -q -c $(VENV)/constraints.txt -e ".[$(EXTRAS)]"
	@touch $@

# Bubblewrap, where it may be installed without asking; else say how.
sandbox:
	@command -v bwrap >/dev/null || { \
	  if [ "$$(id -u)" = 0 ]; then apt-get update -qq && apt-get install -y -qq bubblewrap; \
	  elif sudo -n true 2>/dev/null; then sudo apt-get update -qq && sudo apt-get install -y -qq bubblewrap; \
	  else echo "no bubblewrap: for the hostile examples run: sudo apt-get install bubblewrap"; fi; } >&2 || true

# A Slurm of one node, from Debian's packages; the test starts it in a folder of its own.
test-slurm: env sandbox
	@command -v slurmctld munged >/dev/null || { \
	  if [ "$$(id -u)" = 0 ]; then apt-get update -qq && apt-get install -y -qq slurm-wlm munge; \
	  elif sudo -n true 2>/dev/null; then sudo apt-get update -qq && sudo apt-get install -y -qq slurm-wlm munge; \
	  else echo "no Slurm: run: sudo apt-get install slurm-wlm munge"; fi; } >&2 || true
	$(PY) -m pytest tests/kit/test_slurm.py -m slurm -rs

grade: env sandbox
	@$(PY) -m examples.grade --out out --jobs 2

# The reference on all stages; beside it form, stubs in step, one mutant and variant a stage, then the kit's own tests.
test: env sandbox
	@$(MAKE) --no-print-directory -j 2 stages kit

# Two processes on two cores: torch's own threads would only wait for each other.
stages kit checks: export OMP_NUM_THREADS := 1

stages: env
	$(PY) -m pytest tests --impl reference --profile full

kit: checks
	$(PY) -m pytest tests/kit -n 2 --dist loadfile --no-loadscope-reorder --durations 30 --durations-min 3

checks: lint
	$(PY) -m grader stubs --check
	$(PY) -m grader mutants --sample

# Every command of README and chapters, what *runs* links point to, and the site.
test-docs: env sandbox
	@$(PY) -m pip install --no-compile --progress-bar on -q -c $(VENV)/constraints.txt -e ".[docs,browser]"
	$(PY) -m pytest tests/docs

# The chapters and notebooks as a site that needs no network, in build/handout; EDITION=solutions shows the reference.
# PROFILE=core keeps the exercises of that profile. With Chromium the book is printed beside the site; `make pdf` wants it.
handout pdf: BROWSER = $(shell command -v chromium chromium-browser google-chrome)
handout pdf: env
	@$(PY) -c 'import furo, latex2mathml, myst_nb' 2>/dev/null || \
	  $(PY) -m pip install --no-compile --progress-bar on -q -c $(VENV)/constraints.txt -e ".[docs]"
	@$(PY) -m handout.site --edition $(or $(EDITION),student) --profile $(or $(PROFILE),full) $(if $(or $(filter pdf,$@),$(BROWSER)),--pdf)

lint: env
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check -q .
	@$(PY) -m mypy
	@$(VENV)/bin/lint-imports --no-logo --no-cache

# Two stages at a time, those with most mutants first.
mutants: export OMP_NUM_THREADS := 1
mutants: env
	@$(MAKE) --no-print-directory -k -j 2 $(patsubst grader/mutants/%.toml,mutants-%,$(shell ls -S grader/mutants/*.toml))

mutants-%:
	@$(PY) -m grader mutants --stage $*

# Every attack of grader/hostile/ with an honest neighbour.
hostile: env sandbox
	$(PY) -m grader hostile

soak: env
	$(PY) -m benchmarks.verdicts

bench: env sandbox
	$(PY) -m benchmarks.overhead
	$(PY) -m benchmarks.grading

# Everything that needs a GPU, in at most 25 minutes. A checkout needs no install, but the packages of `dependencies` in
# pyproject.toml. Run it again to go on; AGAIN=1 forgets what passed; PEER=path:function adds another attention.
gpu:
	PYTHONPATH=. $(if $(wildcard $(PY)),$(PY),$(PYTHON)) -m benchmarks.gpu $(if $(AGAIN),--again) $(if $(PEER),--peer $(PEER))

survival: env sandbox
	$(PY) -m benchmarks.survival

clean:
	rm -rf $(VENV) .cache out build *.egg-info
