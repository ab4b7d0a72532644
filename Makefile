# The only entry points; README and CI use the same ones.
PYTHON ?= python3
SERVE := .venv/serve
DEV := .venv/dev
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: demo test check bench faults bundle clean

demo: $(SERVE)/.installed  ## photographs in, verdicts out; PHOTOS=/a/folder for your own, DEMO_EXIT=1 to stop by itself
	$(SERVE)/bin/python -m demo $(if $(PHOTOS),--photos "$(PHOTOS)") $(if $(DEMO_EXIT),--exit)

test: $(DEV)/.installed  ## all tests, PostgreSQL among them
	$(DEV)/bin/python -m pytest -m "not faults" -n 2 --dist loadfile --no-loadscope-reorder

check: $(DEV)/.installed  ## ruff, mypy strict, import contracts
	$(DEV)/bin/ruff check .
	$(DEV)/bin/ruff format --check .
	$(DEV)/bin/mypy
	$(DEV)/bin/lint-imports

bench: $(DEV)/.installed  ## speed as ratios, JSON on stdout
	$(DEV)/bin/python -m benchmarks.serving

faults: $(DEV)/.installed  ## the long fault runs, and other tests that take long
	$(DEV)/bin/python -m pytest -m faults --timeout 1800

bundle: $(DEV)/.installed  ## build and calibrate the bundle that comes with Roadmatch (needs apt-get and dpkg, no root)
	$(DEV)/bin/python -m training.default_bundle

$(SERVE)/.installed: pyproject.toml
	$(PYTHON) -m venv $(SERVE)
	$(SERVE)/bin/pip install --quiet -e '.[cpu,demo]'
	touch $@

$(DEV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(DEV)
	$(DEV)/bin/pip install --quiet -e '.[dev]'
	touch $@

clean:  ## remove the virtual environments and caches
	rm -rf .venv .cache build *.egg-info
