.PHONY: help run setup style quality test test-slow smoke site

VENV ?= .venv

help:  ## Print the targets.
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

run: $(VENV)/ready  ## Install into .venv, and train on the embedded scenes: four minutes on two CPU cores.
	$(VENV)/bin/accelerate launch scripts/pretrain.py $(ARGS)

$(VENV)/ready: requirements.txt pyproject.toml
	python3 -m venv $(VENV)
	$(VENV)/bin/pip install -r requirements.txt
	touch $@

$(VENV)/ready-to-test: $(VENV)/ready requirements-dev.txt
	$(VENV)/bin/pip install -r requirements-dev.txt
	touch $@

setup:  ## Install everything into the active environment.
	pip install -r requirements-dev.txt ruff mypy types-PyYAML types-tqdm

style:  ## Mend what can be mended.
	ruff check --fix .
	ruff format .

quality:  ## What the continuous integration checks besides tests.
	ruff check .
	ruff format --check .
	mypy

test: $(VENV)/ready-to-test  ## Install into .venv, and run the quick tests.
	$(VENV)/bin/python -m pytest -n 2

test-slow:  ## The long ones.
	python -m pytest -n 2 -m slow

smoke:  ## The main job on a few scenes.
	accelerate launch scripts/pretrain.py --max_train_samples 256 --max_eval_samples 64 --max_steps 4 \
		--output_dir outputs/smoke --overwrite_output_dir

site: $(VENV)/ready-to-test  ## Build the pages of docs/ into outputs/site.
	$(VENV)/bin/mkdocs build --strict
