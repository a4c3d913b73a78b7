.PHONY: help run setup style quality test test-slow promises smoke site

VENV ?= .venv

help:  ## Print the targets; all of them use .venv.
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

run: $(VENV)/ready  ## Install into .venv, and train on the embedded scenes: four minutes on two CPU cores.
	$(VENV)/bin/python scripts/pretrain.py $(ARGS)

$(VENV)/ready: requirements.txt pyproject.toml
	python3 -m venv $(VENV)
	$(VENV)/bin/pip install -r requirements.txt
	touch $@

$(VENV)/ready-to-test: $(VENV)/ready requirements-dev.txt
	$(VENV)/bin/pip install -r requirements-dev.txt
	touch $@

$(VENV)/ready-to-check: $(VENV)/ready-to-test
	$(VENV)/bin/pip install ruff mypy types-PyYAML types-tqdm
	touch $@

setup: $(VENV)/ready-to-check  ## Install into .venv what the other targets need.

style: $(VENV)/ready-to-check  ## Mend what can be mended.
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

quality: $(VENV)/ready-to-check  ## What the continuous integration checks besides tests.
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m tests.plain
	$(VENV)/bin/python -m tests.gauge

test: $(VENV)/ready-to-test  ## The quick tests.
	$(VENV)/bin/python -m pytest -n 2

test-slow: $(VENV)/ready-to-test  ## The long ones.
	$(VENV)/bin/python -m pytest -n 2 -m slow

PROMISES = tests/distributed tests/faults tests/launch tests/run/test_starts.py tests/test_readme.py tests/test_text.py
promises: $(VENV)/ready-to-test  ## What slow tests alone hold: FSDP2, DeepSpeed, Ray, kills, restarts, secrets, the README.
	$(VENV)/bin/python -m pytest -n 2 -m slow $(PROMISES)

smoke: $(VENV)/ready  ## The main job on a few scenes.
	rm -rf outputs/smoke
	$(VENV)/bin/python scripts/pretrain.py --max_train_samples 256 --max_eval_samples 64 --max_steps 4 --output_dir outputs/smoke

site: $(VENV)/ready-to-test  ## Build the pages of docs/ into outputs/site.
	$(VENV)/bin/mkdocs build --strict
