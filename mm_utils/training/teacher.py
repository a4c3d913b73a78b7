"""Embed all training media and captions with a teacher once, into the store of frozen towers' features."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from mm_utils.data.batches.column_cache import column_digest, image_digest
from mm_utils.data.batches.order import Draw, evaluation_batches
from mm_utils.data.batches.tokens import fingerprint, tokenizer_digest
from mm_utils.data.images import open_image
from mm_utils.data.media.medium import read_by
from mm_utils.data.training_data import TrainingData
from mm_utils.model.build import open_model
from mm_utils.model.reading import UnreadableError
from mm_utils.objectives.contrastive import Distillation
from mm_utils.training.feature_cache import Block, stored_features, weights_digest

FLAG = "--teacher_name_or_path"


class Teacher(nn.Module):
    """A saved model, or of `st:FOLDER` a SentenceTransformer, which has no inverse temperature (`scale`) of its own."""

    def __init__(self, name: str):
        super().__init__()
        folder = Path(name.removeprefix("st:"))
        self.scale = None
        self.medium = None
        if not name.startswith("st:"):
            model, processor = open_model(name)
            self.model = model.float()
            self.medium = read_by(processor)
            self.scale = self.model.logit_scale.exp().item()
            self.width = self.model.config.projection_dim
            reads = self.medium.key, tokenizer_digest(processor.tokenizer)
            settings = {**self.model.config.to_dict(), "reads": str(reads)}
        else:
            from sentence_transformers import SentenceTransformer

            safe = {"use_safetensors": True, "dtype": "float32"}
            self.model = SentenceTransformer(str(folder), device="cpu", trust_remote_code=False, model_kwargs=safe)
            self.width = self.embed(["a"]).shape[1]
            files = sorted(path for path in folder.rglob("*") if path.suffix in (".json", ".txt", ".model", ".jinja"))
            settings = {str(path.relative_to(folder)): path.read_bytes().hex() for path in files}
        self.config = SimpleNamespace(to_dict=lambda: settings)  # for the digest

    def read(self, value: dict[str, Any]) -> Any:
        """Return a stored medium as `embed` takes it; None if it cannot be decoded, which is never shown."""
        try:
            return open_image(value) if self.medium is None else self.medium.read(value)[0]
        except UnreadableError:
            return None

    def embed(self, given: list[Any]) -> Tensor:
        """Return unit embeddings `[n, E]` of texts, or of media as `read` returns them."""
        if self.medium is None:
            options = {"convert_to_tensor": True, "normalize_embeddings": True, "show_progress_bar": False}
            return self.model.encode(given, **options).float().cpu()
        if isinstance(given[0], str):
            return self.model.encode(texts=given)
        pixels = self.medium.features(torch.stack(given).to(self.model.logit_scale.device))
        return self.model.encode_image(pixels, with_keys_values=False)[0].float().cpu()


@torch.no_grad()
def _embeddings(
    teacher: Teacher, rows: datasets.Dataset, batches: Sequence[list[Draw]], accelerator: Accelerator
) -> Iterator[Block]:
    with ThreadPoolExecutor() as pool, accelerator.autocast():
        for draws in batches:
            drawn = [rows[row] for row, _ in draws]
            counts = [len(row["captions"]) for row in drawn]
            image_nE = torch.zeros(len(drawn), teacher.width)
            text_tE = torch.zeros(sum(counts), teacher.width)
            media = dict(enumerate(pool.map(teacher.read, [row["image"] for row in drawn])))
            if there := [place for place, medium in media.items() if medium is not None]:
                image_nE[there] = teacher.embed([media[place] for place in there])
                text_tE = teacher.embed([text for row in drawn for text in row["captions"]])
            yield {"teacher_image": (image_nE,), "teacher_text": (text_tE, counts)}, {}


def distill(
    data: TrainingData, objective: Any, name: str | None, accelerator: Accelerator, root: Path | None = None
) -> TrainingData:
    """Return the data with the embeddings of a teacher, where one is named, beside the training rows, for `distillation`, which takes its scale.

    They are stored as those of `cache_features` are. A resumed run must have the same teacher.

    Raises:
        ValueError: if it is of other media.
    """
    if name is None:
        return data
    teacher = Teacher(name)
    kind = "image" if teacher.medium is None else teacher.model.config.medium
    if data.medium != kind:
        raise ValueError(f"{FLAG} is {name}; it embeds {kind}s, and the data are {data.medium}s. Give another.")
    rows = data.splits["train"]
    batches = evaluation_batches(len(rows), data.eval_batch_size)
    with data.timed_pass():
        embeddings = stored_features(
            "teacher",
            teacher,
            (image_digest(rows), column_digest(rows, "captions"), fingerprint(rows)),
            _embeddings(teacher, rows, batches, accelerator),
            model=teacher,
            batches=batches,
            accelerator=accelerator,
            flag=FLAG,
            root=root,
        )
    for term in objective.weights:
        if isinstance(term, Distillation):
            term.scale = teacher.scale
    features = {**data.features, "train": datasets.concatenate_datasets([data.rows("train"), embeddings], axis=1)}
    return replace(data, features=features, identity={**data.identity, "teacher": weights_digest(teacher)})
