"""A model that looks up what it is asked, for tests of what is measured of a model."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from mm_utils import ranks, split_embeddings
from mm_utils.data.batches import Collator
from mm_utils.data.order import EvaluationBatches
from mm_utils.split_embeddings import Embeddings

ACCELERATOR: Any = SimpleNamespace(device=torch.device("cpu"), is_main_process=False, autocast=nullcontext)
LANGUAGES_OF_TEXTS = ("en", "de-DE", "en", "", "zh/Hant")


def split_of(image: Tensor, text: Tensor, owner: list[int]) -> Embeddings:
    """A split of which text t belongs to image `owner[t]`."""
    keys = 1000 + 7 * torch.arange(len(image))
    nothing = torch.zeros(len(text), 1, dtype=torch.long)
    return Embeddings(
        image, text, keys, keys[torch.tensor(owner)], torch.arange(len(image)), None, range(0), nothing, nothing
    )


def in_languages(split: Embeddings, languages: list[str]) -> Embeddings:
    """As `embed_split` gives it for captions of these languages."""
    sizes = ranks.gather_sizes(len(languages), torch.device("cpu"))
    split.languages = split_embeddings._gather_languages([*languages], sizes, torch.device("cpu"))
    return split


class TruthfulModel:
    """Looks embeddings up by the number that an image shows and a caption says; its head knows which belong together.

    With `logits` `[M, T]`, the head says those instead. `seen` counts the images that were encoded, `scored` the pairs.
    The number of image i fills its pixels; caption t is the tokens [1, t, image of t].
    """

    config = SimpleNamespace(projection_dim=6)
    logit_scale = torch.tensor(2.0)
    fusion: Any = True

    def __init__(self, images: int = 23, truth: float = 1000.0, owner: list[int] | None = None):
        generator = torch.Generator().manual_seed(9)
        counts = torch.randint(1, 4, (images,), generator=generator)
        self.owner = torch.repeat_interleave(torch.arange(images), counts).tolist()
        self.image, self.text = (
            normalize(torch.randn(count, 6, generator=generator), dim=1) for count in (images, len(self.owner))
        )
        self.truth, self.scored, self.seen = truth, 0, 0
        self.logits: Tensor | None = None

    def encode_image(self, pixel_values: Tensor, with_keys_values: bool = True) -> tuple[Tensor, Any]:
        number = pixel_values[:, 0, 0, 0].round().long()
        self.seen += len(number)
        keys_values = (number.float()[None, :, None, None, None].expand(2, -1, 1, 1, 1),)
        return self.image[number], keys_values if with_keys_values else None

    def encode_text(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        assert (attention_mask[:, :3] == 1).all()
        return self.text[input_ids[:, 1]], input_ids[:, :, None].float()

    def match_pairs(self, keys_values: tuple[Tensor, ...], text_states: Tensor, attention_mask: Tensor) -> Tensor:
        assert len(text_states) == len(attention_mask) == keys_values[0].shape[1]
        self.scored += len(text_states)
        image = keys_values[0][0, :, 0, 0, 0]
        if self.logits is not None:
            return self.logits[image.long(), text_states[:, 1, 0].long()]
        return torch.where(image == text_states[:, 2, 0], self.truth, -self.truth)

    def batches(self, batch_size: int, unreadable: tuple[int, ...] = ()) -> list[dict[str, Any]]:
        """This rank's share, as `Loaders.evaluation` gives it."""
        examples = []
        for number in range(len(self.image)):
            texts = [text for text, image in enumerate(self.owner) if image == number]
            examples.append(
                {"skipped": f"image {number}: broken"}
                if number in unreadable
                else {
                    "row": number,
                    "image_id": str(number),
                    "image_key": 10**12 + number,
                    "pixel_values": torch.full((3, 2, 2), number, dtype=torch.uint8),
                    "input_ids": [[1, text, number, *[5] * (text % 9)] for text in texts],
                    "caption_keys": texts,
                    "languages": [self.language_of(text) for text in texts],
                }
            )
        collate = Collator(pad_token_id=0, image_size=2)
        return [
            collate([examples[row] for row, _ in draws]) for draws in EvaluationBatches(len(self.image), batch_size)
        ]

    def language_of(self, text: int) -> str:
        return LANGUAGES_OF_TEXTS[text % len(LANGUAGES_OF_TEXTS)]

    def split(self) -> Embeddings:
        split = split_of(self.image, self.text, self.owner)
        return in_languages(split, list(map(self.language_of, range(len(self.owner)))))
