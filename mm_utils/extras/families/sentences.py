"""Teach a new text tower the sentences of two languages, from no images: parallel lines as a term of the loss.

A whole model embeds the first column of a file of tabs once, before training; the new text tower learns to embed every column
there (Reimers and Gurevych, arXiv 2004.09813). So a caption of the other language comes to lie where the image side of that model,
which is not trained, expects it. Each row of a batch draws one sentence by seed, step and row, whatever the ranks and the parts
of the batch.

Shape letters: M lines, K columns of the file, L tokens, E embedding width, n rows of a batch.
"""

import hashlib
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor

from mm_utils import distributed
from mm_utils.arguments import Parsed, arg
from mm_utils.data.batches.column_cache import add_weights
from mm_utils.data.batches.tokens import encode_captions, pad_captions
from mm_utils.files import read_regular_file
from mm_utils.model.build import load_model
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.model.processor import load_processor_of
from mm_utils.objectives import ObjectiveArguments
from mm_utils.objectives.losses import GlobalBatch
from mm_utils.objectives.terms import Batch, EmbeddingTerm, EncodedBatch, LossInputs, Report
from mm_utils.stored import key_of, stored
from mm_utils.training.callbacks import RunCallback

logger = logging.getLogger(__name__)

_FILE = "sentences.safetensors"


class Sentences(EmbeddingTerm):
    """One minus the cosine of a sentence with what the whole model makes of its first column.

    Attributes:
        tokens_MKL, mask_MKL: all sentences, as tokens of the model that is trained; set by `CacheSentences`.
        target_ME: the unit embeddings of the first column.
    """

    name = "sentences"
    refuses: ClassVar[Mapping[str, str]] = {"freeze_text": "leaves no text tower to teach"}
    tokens_MKL: Tensor | None = None
    mask_MKL: Tensor
    target_ME: Tensor

    def embed(self, model: FusionDualEncoderModel, encoded: EncodedBatch, batch: Batch) -> dict[str, Tensor]:
        """Return one sentence for each row, as the model embeds it, and its target."""
        if self.tokens_MKL is None:
            raise ValueError(
                "--objectives has sentences, which learns from parallel lines. Give --set parallel_sentences=lines.tsv, or drop "
                "the term."
            )
        lines, columns, _ = self.tokens_MKL.shape
        drawn_n = batch["row_keys"].remainder(lines * columns)
        mask_nL = self.mask_MKL.flatten(0, 1)[drawn_n]
        longest = int(mask_nL.sum(1).max())
        tokens_nL = self.tokens_MKL.flatten(0, 1)[drawn_n, :longest]
        found, _ = model.encode_text(tokens_nL, mask_nL[:, :longest].contiguous(), with_states=False)
        return {"sentences": found, "sentences_target": self.target_ME[drawn_n // columns].to(found)}

    def loss(self, own: LossInputs, batch: GlobalBatch) -> Tensor:
        """Return the mean over the global batch; each rank computes its own rows."""
        apart = (1 - (own.embeds["sentences"] * own.embeds["sentences_target"]).sum(1)).sum() / max(
            1, sum(batch.sizes)
        )
        whole = distributed.sum_over_ranks(apart)
        return whole + distributed.world_size() * (apart - apart.detach())

    def metrics(self, value: Tensor, own: LossInputs) -> Report:
        """Return the loss, and the mean cosine."""
        return {"sentences_loss": value, "sentences_cosine": 1 - value}


@dataclass
class SentenceArguments:
    """Parallel sentences, from which `sentences` learns."""

    parallel_sentences: str | None = arg(
        None,
        "For the term sentences: a file of tabs, a line the same sentence in several languages, the first one that of "
        "--model_name_or_path, whose text embedding is the target. With --text_model_name_or_path.",
        rare=True,
    )


class CacheSentences(RunCallback):
    """Embed the first column with the whole model before the first step, and tokenise all."""

    scripts = ("pretrain",)
    flag = "parallel_sentences"
    arguments = SentenceArguments

    def __init__(self, path: Path, teacher: str):
        self.path, self.teacher = path, teacher

    @classmethod
    def attach(cls, given: Parsed) -> "CacheSentences":
        """Return the callback.

        Raises:
            ValueError: if the file cannot be read, or the term or a model is missing.
        """
        if "sentences" not in given[ObjectiveArguments].weights:
            given.refuse("parallel_sentences", "sentences is not a term of --objectives")
        if not (given["model_name_or_path"] and given["text_model_name_or_path"]):
            raise ValueError(
                f"--set parallel_sentences is {given['parallel_sentences']}; it teaches a new text tower what a whole model makes of "
                "the first column. Give --model_name_or_path and --text_model_name_or_path."
            )
        read_lines(given["parallel_sentences"])
        return cls(Path(given["parallel_sentences"]), given["model_name_or_path"])

    def on_start(self, run: Any) -> None:
        """Set tokens and targets of the term."""
        lines, accelerator, tokenizer = read_lines(str(self.path)), run.run.accelerator, run.data.processor.tokenizer
        [term] = [each for each in run.objective.weights if isinstance(each, Sentences)]
        device = accelerator.device
        term.target_ME = target_embeds(self.teacher, [line[0] for line in lines], accelerator).to(device)
        flat = encode_captions(tokenizer, [text for line in lines for text in line], None, run.data.max_seq_length)
        tokens, mask = pad_captions(flat, run.data.loaders.pad_token_id)
        columns = len(lines[0])
        term.tokens_MKL, term.mask_MKL = (each.unflatten(0, (-1, columns)).to(device) for each in (tokens, mask))
        run.data.identity["sentences"] = key_of(
            lines, hashlib.blake2b(term.target_ME.cpu().numpy().tobytes()).hexdigest()
        )
        logger.info("%s parallel lines of %d sentences each", f"{len(lines):,}", columns)


def read_lines(path: str) -> list[list[str]]:
    """Return the sentences of every line of a file of tabs.

    Raises:
        ValueError: if there is no such file, it is not of UTF-8, or a line has another number of sentences than the first.
    """
    try:
        text = read_regular_file(path, sys.maxsize).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"--set parallel_sentences is {path}; it cannot be read: {error}. Give a file of tabs."
        ) from error
    lines = [[cell.strip() for cell in line.split("\t")] for line in text.split("\n") if line.strip()]
    if not lines or len(lines[0]) < 2:
        raise ValueError(
            f"--set parallel_sentences is {path}; its first line has no two sentences with a tab between. Write one line a "
            "sentence, its translations behind tabs."
        )
    for number, line in enumerate(lines, 1):
        if len(line) != len(lines[0]) or not all(line):
            raise ValueError(
                f"{path}, sentence {number}: {sum(map(bool, line))} languages, and the first has {len(lines[0])}. Complete the "
                "line, or delete it."
            )
    return lines


def target_embeds(name: str, texts: Sequence[str], accelerator: Accelerator) -> Tensor:
    """Return unit embeddings `[M, E]` of texts by a whole model, computed once and kept."""
    model, tokenizer = load_model(name, fusion_layers=0).float().eval(), load_processor_of(name).tokenizer  # type: ignore[attr-defined]
    digest = hashlib.blake2b(digest_size=16)
    add_weights(digest, {key: value for key, value in model.state_dict().items() if key.startswith("text_")})
    key = key_of("sentences", digest.hexdigest(), tokenizer.backend_tokenizer.to_str(), list(texts))
    with distributed.first_then_others():
        folder = stored(
            "sentences",
            key,
            partial(_embed_into, model=model, tokenizer=tokenizer, texts=texts, device=accelerator.device),
        )
    return load_file(folder / _FILE)["target"]


@torch.no_grad()
def _embed_into(
    folder: Path, model: FusionDualEncoderModel, tokenizer: Any, texts: Sequence[str], device: torch.device
) -> None:
    model.to(device)  # type: ignore[arg-type]
    ids, found = encode_captions(tokenizer, list(texts), None, model.most_tokens(tokenizer)), []
    for start in range(0, len(ids), 256):
        tokens, mask = (each.to(device) for each in pad_captions(ids[start : start + 256], tokenizer.pad_token_id))
        found.append(model.encode_text(tokens, mask, with_states=False)[0].float().cpu())
    save_file({"target": torch.cat(found)}, folder / _FILE)
