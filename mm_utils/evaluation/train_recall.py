"""Recall in training: of held-out images, and beside it of training images; the gap is the overfit."""

from collections.abc import Iterable
from functools import cached_property

import numpy as np
from accelerate import Accelerator

from mm_utils.data.batches.loaders import DeviceLoader
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
    return RetrievalEvaluator(args, caption_probes(rows, tokenizer, data.max_seq_length), fits=True)


def train_recall(data: TrainingData, seed: int) -> list[Evaluate]:
    """Return what measures `train_mean_recall`; nothing for a stream, whose rows cannot be picked."""
    return [TrainRecall(data, seed)] if "train" in data.splits else []


class TrainRecall:
    """Measure `train_mean_recall`, on a sample of the training images.

    The sample has as many images as the validation split, at most `MOST_IMAGES`, each with all its captions and as evaluation
    sees it. It is a function of the training rows and the seed.
    """

    reads_features = True

    def __init__(self, data: TrainingData, seed: int):
        self.data, self.seed = data, seed

    @cached_property
    def sample(self) -> DeviceLoader:
        """This rank's share of the sample, once frozen towers have run."""
        rows = self.data.rows("train")
        images = min(len(rows), len(self.data.splits["validation"]), MOST_IMAGES)
        places = np.random.default_rng(self.seed).choice(len(rows), images, replace=False)
        return self.data.loaders.evaluation(rows.select(np.sort(places)), self.data.eval_batch_size)

    def __call__(self, model: FusionDualEncoderModel, loader: Iterable, accelerator: Accelerator) -> dict[str, float]:
        """Evaluate `model`; the loader is that of the validation split."""
        check = loader.check if isinstance(loader, DeviceLoader) else None
        split = embed_split(model, self.sample.with_check(check), accelerator)
        return {"train_mean_recall": retrieval_metrics(split, rank_directions(split))["mean_recall"]}
