"""A model as mteb evaluates it, on its image and image-text tasks (MIEB, arXiv 2504.10471).

mteb 2 hands over batches of texts, of images, or of both, and compares the embeddings itself. Needs ``pip install mteb``.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from mteb.models.abs_encoder import AbsEncoder
from mteb.models.model_meta import ModelMeta
from torch import Tensor
from torch.nn.functional import normalize
from tqdm.auto import tqdm

from mm_utils.model.build import load_model


class MtebModel(AbsEncoder):
    """The two encoders of a trained model; its fusion head plays no part.

    Args:
        model_name: a run's folder, a checkpoint or a Hub id.
        revision: what the results are filed under.
        device: of the model; default: a GPU, if there is one.
    """

    def __init__(self, model_name: str, revision: str | None = None, device: str | None = None, **_: Any):
        place: Any = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.model = load_model(model_name, fusion_layers=0).to(place)
        name = "/".join(Path(model_name).resolve().parts[-2:])  # mteb wants organisation/name
        about = {"name": name, "revision": revision or "unknown", "modalities": ["image", "text"]}
        self.mteb_model_meta = ModelMeta.create_empty(about)

    def encode(self, inputs: Iterable[dict[str, Any]], **_: Any) -> Tensor:
        """Return unit embeddings `[N, E]` of texts, of images, or the sum of both."""
        parts = []
        for batch in tqdm(inputs, desc="Embedding", leave=False, delay=2):
            found = self.model.encode(batch.get("image"), batch.get("text"))
            parts.append(normalize(found[0] + found[1], dim=-1) if isinstance(found, tuple) else found)
        return torch.cat(parts)

    def get_text_embeddings(self, texts: Iterable[dict[str, Any]], **_: Any) -> Tensor:
        """Return unit embeddings `[N, E]` of the texts alone."""
        return self.encode({"text": batch["text"]} for batch in texts)

    def get_image_embeddings(self, images: Iterable[dict[str, Any]], **_: Any) -> Tensor:
        """Return unit embeddings `[N, E]` of the images alone."""
        return self.encode({"image": batch["image"]} for batch in images)
