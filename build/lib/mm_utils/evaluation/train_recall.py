"""Recall in training: of held-out images, and beside it of training images; the gap is the overfit."""

from collections.abc import Iterable

import numpy as np
from accelerate import Accelerator

from mm_utils.data.batches.loaders import DeviceLoader
from mm_utils.data.batches.workers import CheckedLoader
from mm_utils.data.training_data import TrainingData
from mm_utils.evaluation.embeddings import embed_split
from mm_utils.evaluation.metrics import retrieval_metrics
from mm_utils.evaluation.probes import caption_probes
from mm_utils.evaluation.reranking import rank_directions
from mm_utils.evaluation.retrieval import Evaluate, EvaluationArguments, RetrievalEvaluator
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel

MOST_IMAGES = 2_000
"""Largest sample: beyond it the recall says little more, at the cost of a pass of both towers. Among fewer images recall is
higher, so beside a larger validation split the figure is too high."""


def validation_evaluator(args: EvaluationArguments, data: TrainingData) -> RetrievalEvaluator:
    """Return the evaluator of the validation split, with the probes of its captions."""
    rows, tokenizer = data.splits["validation"], data.processor.tokenizer
    return RetrievalEvaluator(
        args, caption_probes(rows, tokenizer, data.max_seq_length, "PROBES_IN_TRAINING"), fits=True
    )


def train_recall(data: TrainingData, seed: int) -> list[Evaluate]:
    """Return what measures `train_mean_recall`, on a sample of the training images; nothing for a stream.

    The sample has as many images as the validation split, at most `MOST_IMAGES`, each with all its captions and as evaluation
    sees it. It is a function of the training rows and the seed. The rows of a stream cannot be picked.
    """
    if "train" not in data.splits:
        return []
    sample = _sample(data, seed)

    def measure(model: FusionDualEncoderModel, loader: Iterable, accelerator: Accelerator) -> dict[str, float]:
        checked = loader.beside(sample) if isinstance(loader, CheckedLoader) else sample
        split = embed_split(model, checked, accelerator)
        return {"train_mean_recall": retrieval_metrics(split, rank_directions(split))["mean_recall"]}

    return [measure]


def _sample(data: TrainingData, seed: int) -> DeviceLoader:
    rows = data.splits["train"]
    images = min(len(rows), len(data.splits["validation"]), MOST_IMAGES)
    places = np.random.default_rng(seed).choice(len(rows), images, replace=False)
    return data.loaders.evaluation(rows.select(np.sort(places)), data.eval_batch_size)
