"""Embed the training data once with a larger dual encoder, and learn from that.

The teacher reads its own images (size, mean, standard deviation, central squares), windows and tokens, and runs as a frozen
tower does (`mm_utils.extras.frozen.feature_cache`): on all processes, before the first step, into a store that later runs
with the same teacher and data read. It is in memory until then.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import datasets
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from mm_utils import distributed
from mm_utils.data.batches.column_cache import column_digest, image_digest
from mm_utils.data.batches.loaders import make_loaders
from mm_utils.data.batches.tokens import fingerprint, tokenize_captions, tokenizer_digest
from mm_utils.data.training_data import TrainingData
from mm_utils.extras.frozen.feature_cache import Block, Source, weights_digest
from mm_utils.extras.frozen.sentence_teacher import PREFIX, Embedder, SentenceTeacher
from mm_utils.model.build import load_model
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.model.processor import load_processor_of
from mm_utils.objectives import JointObjective


def cache_teacher(name: str | None, data: TrainingData, objective: JointObjective, accelerator: Accelerator) -> None:
    """Put the teacher's embeddings beside the training rows, in `data.features`; its scale in the term.

    Nothing if no term learns from it. A resumed run must have the same teacher. Called on all ranks, before the model is
    prepared and after `cache_features`.

    Raises:
        ValueError: if there is no such model, if its embeddings are not finite, or if processes share no cache.
    """
    terms: list[Any] = [term for term in objective.weights if term.name == "distillation"]
    if not terms or name is None:
        return
    if name.startswith(PREFIX):
        _cache_sentence_teacher(name, data, accelerator)
        return
    model, processor = load_model(name, fusion_layers=0).float().eval(), load_processor_of(name)
    padding = model.config.text_padding or {"length": processor.tokenizer.model_max_length}
    length, train = min(data.max_seq_length, padding["length"]), data.splits["train"]
    columns = [column for column in ("id", "image", "captions", "languages") if column in train.column_names]
    with distributed.first_then_others():
        rows = tokenize_captions(train.select_columns(columns), processor.tokenizer, length)
    # the flags are for the student's window
    own = replace(data.loaders.arguments, medium_seconds=None, clip_frames=None)
    loaders = make_loaders(own, accelerator.device, processor)
    source = _Teacher(rows, loaders, data.eval_batch_size, model, accelerator)
    source.words = length, tokenizer_digest(processor.tokenizer)
    data.features["train"] = datasets.concatenate_datasets([data.rows("train"), source.open_or_compute()], axis=1)
    data.identity["teacher"] = weights_digest(model)
    for term in terms:
        term.scale = model.logit_scale.exp().item()


def _cache_sentence_teacher(name: str, data: TrainingData, accelerator: Accelerator) -> None:
    """Put the embeddings of a SentenceTransformer beside the rows."""
    train = data.splits["train"]
    if data.medium != "image":
        raise ValueError(f"--teacher_name_or_path is {name}; it embeds images, and the data are {data.medium}s.")
    embedder = Embedder(name)
    found = SentenceTeacher(train, data, embedder, accelerator).open_or_compute()
    data.features["train"] = datasets.concatenate_datasets([data.rows("train"), found], axis=1)
    data.identity["teacher"] = weights_digest(embedder)


class _Teacher(Source):
    """The teacher, run on the central square of every image and on all its captions."""

    name, flag = "teacher", "--teacher_name_or_path"
    words: tuple[int, str]  # the longest caption in tokens, and the tokenizer
    model: FusionDualEncoderModel

    @property
    def tower(self) -> nn.Module:
        return self.model

    def depends_on(self) -> tuple:
        loaders, captions = self.loaders, column_digest(self.rows, "captions")
        images = (*loaders.input_key, image_digest(self.rows))
        return *images, *self.words, captions, fingerprint(self.rows)

    @torch.no_grad()
    def blocks(self) -> Iterator[Block]:
        width, device = self.model.config.projection_dim, self.accelerator.device
        tokens = self.rows.select_columns(["input_ids"])
        loader = self.loaders.evaluation(self.rows, self.batch_size)
        for draws, batch in zip(self.batches, loader, strict=True):
            places = {row: place for place, (row, _) in enumerate(draws)}
            captions = tokens[[row for row, _ in draws]]["input_ids"] if draws else []
            counts = [len(row) for row in captions]
            starts = [sum(counts[:place]) for place in range(len(counts))]
            image_nE, text_tE = (torch.zeros(size, width, device=device) for size in (len(draws), sum(counts)))
            if len(batch["rows"]):  # images that cannot be decoded, and their captions, are never shown
                there = [places[row] for row in batch["rows"].tolist()]
                of_them = [starts[place] + number for place in there for number in range(counts[place])]
                image_nE[there], text_tE[of_them] = self._run(batch)
            yield {"teacher_image": (image_nE,), "teacher_text": (text_tE, counts)}, {}

    def _run(self, batch: dict) -> tuple[Tensor, Tensor]:
        with self.accelerator.autocast():
            image_nE, _ = self.model.encode_image(batch["pixel_values"], with_keys_values=False)
            text_tE, _ = self.model.encode_text(batch["input_ids"], batch["attention_mask"])
        return image_nE.float(), text_tE.float()
