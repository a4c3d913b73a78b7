.PHONY: setup style quality test test-slow smoke

setup:  ## Install everything into the active environment.
	pip install -r requirements.txt ruff mypy types-PyYAML types-tqdm

style:  ## Mend what can be mended.
	ruff check --fix .
	ruff format .

quality:  ## What the continuous integration checks besides tests.
	ruff check .
	ruff format --check .
	mypy

test:  ## The quick tests.
	python -m pytest -n 2

test-slow:  ## The long ones.
	python -m pytest -n 2 -m slow

smoke:  ## The main job on a few scenes.
	accelerate launch scripts/pretrain.py --max_train_samples 256 --max_eval_samples 64 --max_steps 4 \
		--output_dir outputs/smoke --overwrite_output_dir
