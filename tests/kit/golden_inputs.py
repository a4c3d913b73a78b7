"""What the runs of `tests.golden` read: drawn pictures in every format, sounds, clips, and small models with random weights."""

import io
import json
import sqlite3
import tarfile
import wave
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import transformers as hf
from PIL import Image, ImageDraw


def write_inputs(folder: Path) -> None:
    """Write all of them."""
    _write_pictures(folder)
    _write_sounds_and_clips(folder)
    _write_models(folder)


def _put(path: Path, content: bytes | list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not isinstance(content, bytes):
        content = "".join(json.dumps(line) + "\n" for line in content).encode()
    path.write_bytes(content)


def _write_pictures(folder: Path) -> None:
    """48 pictures of a shape on noise, with two captions and a box."""
    noise = np.random.default_rng(0)
    rows = []
    stored = []
    images = []
    captions = []
    karpathy = []
    for n in range(48):
        colour = ("red", "green", "blue")[n % 3]
        shape = ("ellipse", "rectangle")[n // 3 % 2]
        x = n % 4 * 5
        y = n // 6 % 4 * 5
        split = "train" if n % 4 < 3 else "val"
        image = Image.fromarray(noise.integers(0, 200, (5, 5, 3), np.uint8)).resize((40, 40), Image.Resampling.NEAREST)
        getattr(ImageDraw.Draw(image), shape)([x, y, x + 20, y + 20], fill=colour)
        image.save(png := io.BytesIO(), "PNG")
        texts = [f"a {colour} {shape} at {x} and {y}, number {n}", f"number {n}: {shape} in {colour}"]
        for place in ("images", "imagefolder", f"classes/{colour}"):
            _put(folder / place / f"{n}.png", png.getvalue())
        _put(folder / f"texts/{n}.txt", texts[0].encode())
        name = f"images/{n}.png"
        regions = [{"box": [x, y, 20, 20], "phrase": f"a {colour} {shape}"}]
        rows.append({"image": name, "captions": texts, "split": split, "regions": regions})
        stored.append({"id": str(n), "image": {"bytes": png.getvalue(), "path": None}, "captions": texts})
        images.append({"id": n, "file_name": name})
        captions += [{"id": 2 * n + k, "image_id": n, "caption": text} for k, text in enumerate(texts)]
        karpathy.append(
            {"filename": name, "cocoid": n, "split": split, "sentences": [{"raw": text} for text in texts]}
        )
    _put(folder / "pairs.jsonl", rows)
    _put(
        folder / "imagefolder/metadata.jsonl",
        [{"file_name": f"{row['id']}.png", "captions": row["captions"]} for row in stored],
    )
    _put(folder / "coco.json", [{"images": images, "annotations": captions}])
    _put(folder / "dataset.json", [{"dataset": "coco", "images": karpathy}])
    one = [(row["image"], row["captions"][0], row["split"]) for row in rows]
    _put(folder / "pairs.csv", "\n".join(["image,caption,split", *(f'{i},"{c}",{s}' for i, c, s in one), ""]).encode())
    _put(folder / "captions.txt", "\n".join(["image,caption", *(f"{i},{c}" for i, c, _ in one), ""]).encode())
    pq.write_table(pa.Table.from_pylist(stored), folder / "pairs.parquet", row_group_size=8)
    database = sqlite3.connect(folder / "pairs.db")
    database.execute("CREATE TABLE pairs (image TEXT, caption TEXT, split TEXT)")
    database.executemany("INSERT INTO pairs VALUES (?, ?, ?)", one)
    database.commit()
    database.close()
    (folder / "shards").mkdir()
    for shard in range(2):
        with tarfile.open(folder / f"shards/{shard:03}.tar", "w") as archive:
            for n in range(24 * shard, 24 * shard + 24):
                archive.add(folder / f"images/{n}.png", f"{n}.png")
                archive.add(folder / f"texts/{n}.txt", f"{n}.txt")


def _write_sounds_and_clips(folder: Path) -> None:
    """24 sounds of two tones, with their moments, and clips of four of the pictures."""
    sounds = []
    clips = []
    for n in range(24):
        split = "train" if n % 4 < 3 else "val"
        phrases = [f"tone {n % 5}", f"tone {n // 5}"]
        tones = [np.sin(2 * np.pi * np.arange(4000) / 8000 * (200 + 150 * tone)) for tone in (n % 5, n // 5)]
        with wave.open(file := io.BytesIO(), "wb") as sound:
            sound.setparams((1, 2, 8000, 8000, "NONE", "none"))
            sound.writeframes((np.concatenate(tones) * 2e4).astype("<i2").tobytes())
        _put(folder / f"sounds/{n}.wav", file.getvalue())
        moments = [{"span": [k / 2, k / 2 + 0.5], "phrase": phrase} for k, phrase in enumerate(phrases)]
        said = {"captions": [", then ".join(phrases)], "split": split}
        sounds.append({"audio": f"sounds/{n}.wav", "moments": moments, **said})
        with av.open(file := io.BytesIO(), "w", format="matroska") as film:
            stream = film.add_stream("ffv1", rate=2, width=40, height=40, pix_fmt="bgr0")
            pictures = [Image.open(folder / f"images/{(n + 6 * k) % 48}.png") for k in range(4)]
            for frame in [*map(av.VideoFrame.from_image, pictures), None]:
                film.mux(stream.encode(frame))
        _put(folder / f"clips/{n}.mkv", file.getvalue())
        said = {"id": f"images/{n}.png", "captions": [f"clip {n}"], "split": split}
        clips.append({"video": f"clips/{n}.mkv", **said})
    _put(folder / "sounds.jsonl", sounds)
    _put(folder / "clips.jsonl", clips)


def _write_models(folder: Path) -> None:
    """A stock CLIP and two encoders with random weights, and the configurations of two new encoders."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    pixels = {"image_size": 32, "patch_size": 8}
    letters = "abcdefghijklmnopqrstuvwxyz0123456789,:"
    _put(folder / "vision.json", [{"model_type": "vit", **sizes, **pixels}])
    _put(folder / "text.json", [{"model_type": "bert", **sizes}])
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    pieces = hf.BertTokenizer(vocab={word: n for n, word in enumerate(words)}, model_max_length=64)
    bert = hf.BertConfig(**sizes, vocab_size=len(words))
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    tokens = hf.CLIPTokenizer(vocab={word: n for n, word in enumerate(words)}, merges=[], model_max_length=77)
    ends = {"bos_token_id": len(words) - 2, "eos_token_id": len(words) - 1, "pad_token_id": 1}
    text = {**sizes, **ends, "vocab_size": len(words), "max_position_embeddings": 77}
    clip = hf.CLIPConfig(text_config=text, vision_config={**sizes, **pixels}, projection_dim=24)
    square = {"height": 32, "width": 32}
    images = hf.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=square)
    torch.manual_seed(0)
    parts = {
        "clip": [hf.CLIPModel(clip), hf.CLIPProcessor(images, tokens)],
        "vit": [hf.ViTModel(hf.ViTConfig(**sizes, **pixels)), hf.ViTImageProcessor(size=square)],
        "bert": [hf.BertModel(bert), pieces],
    }
    for name, (model, processor) in parts.items():
        model.save_pretrained(folder / name)
        processor.save_pretrained(folder / name)
