"""The contestant `sentence_transformers`: two towers as a module of it, and its trainer.

Images are distinguished from texts by their type, as in its own CLIP module. The loss is its `MultipleNegativesRankingLoss` in both
directions at its fixed scale of 20; learning rate 1e-4, warm-up and cosine, which follow the clock. Images are prepared as in
`open_clip`; texts are padded to the longest and pooled by the mean.
"""

import io
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from datasets import Dataset
from PIL import Image
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.base.modules.input_module import InputModule
from sentence_transformers.losses import MultipleNegativesRankingLoss
from torch import nn
from torchvision.transforms import Compose, InterpolationMode, Normalize, RandomResizedCrop, ToTensor
from transformers import TrainerCallback

from benchmarks.rivals.judging import Judge, judge_now, mean_of, stock_towers
from benchmarks.rivals.loop_bench import ENDLESS, Bench, to_rgb

LEARNING_RATE = 1e-4


class TwoTowers(InputModule):
    """A stock dual encoder that embeds a batch of images or one of texts."""

    def __init__(self, bench: Bench, model: Any):
        super().__init__()
        self.model, self.max_tokens = model, bench.max_tokens
        self.tokenizer: Any = bench.tokenizer
        size, mean, std = bench.geometry
        crop = RandomResizedCrop(size, scale=(0.9, 1.0), interpolation=InterpolationMode.BICUBIC)
        self.transform = Compose([to_rgb, crop, ToTensor(), Normalize(mean, std)])

    @property
    def modalities(self) -> list[Any]:
        """What it takes."""
        return ["text", "image"]

    def preprocess(self, inputs: Sequence[Any], prompt: str | None = None, **kwargs: Any) -> dict[str, Any]:
        """Tensors of texts, or of images."""
        if isinstance(inputs[0], str):
            settings = {"padding": True, "truncation": True, "max_length": self.max_tokens, "return_tensors": "pt"}
            tokens = self.tokenizer(list(inputs), **settings)
            return {name: tokens[name] for name in ("input_ids", "attention_mask")}
        return {"pixel_values": torch.stack([self.transform(image) for image in inputs])}

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Add `sentence_embedding` [n, E]."""
        if "pixel_values" in features:
            seen = self.model.vision_model(pixel_values=features["pixel_values"])[1]
            return {**features, "sentence_embedding": self.model.visual_projection(seen)}
        ids, mask = features["input_ids"], features["attention_mask"]
        read = mean_of(self.model.text_model(input_ids=ids, attention_mask=mask).last_hidden_state, mask)
        return {**features, "sentence_embedding": self.model.text_projection(read)}

    def save(self, output_path: str, *args: Any, **kwargs: Any) -> None:
        """Nothing is saved."""


def train(bench: Bench, judge: Judge, budget: float, points: int, rate: Callable[[float], float]) -> dict[str, Any]:
    """Train until the time is over, and be judged at equal fractions of it."""
    model, ends = bench.stock_model(), list[float]()
    towers, sentences = (
        stock_towers(bench, model, pools_by_mean=True),
        SentenceTransformer(modules=[TwoTowers(bench, model)]),
    )

    class TheClock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            ends.append(judge.clock.seconds)
            if ends[-1] >= budget * (len(judge.found) + 1) / points:
                judge_now(model, towers, judge)
            control.should_training_stop = ends[-1] >= budget

    images, captions = bench.rows["image"], bench.rows["captions"]
    pairs = [(image, caption) for image, own in zip(images, captions, strict=True) for caption in own]

    def read(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        opened = [Image.open(io.BytesIO(each["bytes"]) if each["bytes"] else each["path"]) for each in rows["image"]]
        return {"image": opened, "text": rows["text"]}

    rows = Dataset.from_dict({"image": [image for image, _ in pairs], "text": [text for _, text in pairs]})
    trained: list[nn.Parameter] = [each for name, each in model.named_parameters() if name != "logit_scale"]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: rate(judge.clock.seconds / budget))
    with tempfile.TemporaryDirectory() as folder:
        settings = SentenceTransformerTrainingArguments(
            folder,
            max_steps=ENDLESS,
            per_device_train_batch_size=bench.task.batch_size,
            dataloader_num_workers=bench.loader_args.num_workers,
            dataloader_drop_last=True,
            seed=bench.task.seed,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        loss = MultipleNegativesRankingLoss(sentences, directions=("query_to_doc", "doc_to_query"))
        SentenceTransformerTrainer(
            sentences,
            settings,
            rows.with_transform(read),
            loss=loss,
            callbacks=[TheClock()],
            optimizers=(optimizer, schedule),
        ).train()
    return {"steps": len(ends)}
