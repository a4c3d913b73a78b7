"""Indexes of sounds and clips: found by text and by file, shown, played, kept up to date; with models of fresh weights."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from accelerate import Accelerator
from PIL import Image

from mm_utils.data.media.pictures import picture
from mm_utils.data.media.riff import read_avi, read_wav
from mm_utils.model.build import load_model
from mm_utils.model.reading import UnreadableError
from mm_utils.search.listing import (
    Listing,
    folder_listing,
    list_folder,
    pair_listing,
)
from mm_utils.search.searcher import Searcher
from mm_utils.search.updating import update_index
from scripts import embed
from tests.kit.fault_images import save
from tests.kit.media_files import clip, damaged, media_rows, tone
from tests.kit.models import save_model
from tests.search.conftest import make_embedder
from tests.search.serving import Served, served

PITCHES = (200, 400, 800, 1600, 3200)
TURNS = [("red", "lime"), ("lime", "red"), ("blue", "white"), ("white", "blue")]
CONTENTS = {"sound": [tone(pitch, 0) for pitch in PITCHES], "clip": [clip([a, a, b, b]) for a, b in TURNS]}


def update(folder: Path, model: Path, listing: Listing) -> Any:
    return update_index(folder, str(model), listing, make_embedder(model, 4), Accelerator(cpu=True))


@pytest.fixture(scope="module", params=["sound", "clip"])
def indexed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    """The kind, a model of it, and an index of rows as prepared sets have them."""
    medium, folder = request.param, tmp_path_factory.mktemp(request.param)
    model = save_model(folder / "model", medium)
    update(folder / "index", model, pair_listing({"train": media_rows(medium, CONTENTS[medium])}))
    return medium, model, folder / "index"


@pytest.fixture(scope="module")
def searcher(indexed: tuple[str, Path, Path]) -> Searcher:
    return Searcher(indexed[2], device="cpu")


def test_an_index_says_its_medium_and_keeps_what_it_shows(indexed: tuple[str, Path, Path], searcher: Searcher) -> None:
    medium, _, index = indexed
    assert json.loads((index / "index.json").read_text())["medium"] == searcher.info.medium == medium
    rows = datasets.load_from_disk(str(index))
    assert rows["content"] == CONTENTS[medium]
    for row, content in enumerate(CONTENTS[medium]):
        with Image.open(io.BytesIO(searcher.thumbnail(row))) as thumbnail:
            assert thumbnail.size == picture({"bytes": content}, medium).size
        assert searcher.content(row) == content


def test_scores_are_those_of_the_model(indexed: tuple[str, Path, Path], searcher: Searcher) -> None:
    medium, folder, _ = indexed
    model = load_model(str(folder)).eval()
    reads = make_embedder(folder).medium
    examples = [reads.read({"bytes": content, "path": None}, None)[0] for content in CONTENTS[medium]]
    ids = searcher._tokenizer(["a low tone"], return_tensors="pt")
    with torch.no_grad():
        embeds, keys_values = model.encode_image(reads.features(torch.stack(examples)))
        text, states = model.encode_text(ids["input_ids"], ids["attention_mask"])
        count = len(examples)
        many = (
            states.expand(count, -1, -1),
            *(ids[name].expand(count, -1) for name in ("attention_mask", "input_ids")),
        )
        head = model.head_scores(keys_values, *many)
    cosine = (embeds @ text[0]).tolist()
    scale = model.logit_scale.exp().item()
    for hit in searcher.search_text("a low tone", 5):
        assert hit.score == pytest.approx(cosine[hit.row], abs=2e-3)
        assert hit.reranked == pytest.approx(cosine[hit.row] + head[hit.row].item() / scale, abs=4e-3)


def test_similar_and_a_file_that_is_searched_for(
    indexed: tuple[str, Path, Path], searcher: Searcher, tmp_path: Path
) -> None:
    medium, *_ = indexed
    assert 2 not in [hit.row for hit in searcher.similar(2)]
    if medium == "clip":
        with pytest.raises(UnreadableError, match="found by texts"):
            searcher.search_file(CONTENTS["clip"][0])
        return
    (tmp_path / "query.wav").write_bytes(CONTENTS["sound"][3])
    for file in (CONTENTS["sound"][3], str(tmp_path / "query.wav")):
        best = searcher.search_file(file, 1)[0]
        assert (best.row, best.score) == (3, pytest.approx(1, abs=2e-3))
    for wrong in (b"OggS" + bytes(99), CONTENTS["sound"][3][:99], b"", tone(0)):
        with pytest.raises(UnreadableError):
            searcher.search_file(wrong)
    with pytest.raises(UnreadableError, match=r"nowhere.wav"):
        searcher.search_file(str(tmp_path / "nowhere.wav"))


def test_no_codec_opens_a_file_that_is_searched_for(
    indexed: tuple[str, Path, Path], searcher: Searcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A WAV file may hold MP3 and much else."""
    if indexed[0] == "clip":
        pytest.skip("clips are not searched for by files")
    monkeypatch.setitem(sys.modules, "av", None)
    compressed = bytearray(CONTENTS["sound"][0])
    compressed[20:22] = (0x55).to_bytes(2, "little")
    with pytest.raises(UnreadableError, match="not a WAV file of plain samples"):
        searcher.search_file(bytes(compressed))


def test_what_is_served(indexed: tuple[str, Path, Path], searcher: Searcher, monkeypatch: pytest.MonkeyPatch) -> None:
    medium = indexed[0]
    running = served(searcher)
    site: Served = next(running)
    page = site.ask("/")
    assert f'data-medium="{medium}"' in page.body.decode()
    assert ("media-src 'self'" in page.headers["content-security-policy"]) == (medium == "sound")
    found = site.ask("/content/1")
    if medium == "sound":
        assert (found.headers["content-type"], found.body) == ("audio/wav", CONTENTS["sound"][1])
        assert site.ask("/search?k=3", "POST", CONTENTS["sound"][2]).hits[0]["row"] == 2
    else:
        assert found.headers["content-type"] == "image/webp"
        with Image.open(io.BytesIO(found.body)) as moving:
            assert moving.n_frames > 1
        with monkeypatch.context() as patch:
            patch.setattr(searcher, "content", lambda row: damaged(CONTENTS["clip"][1], 4))
            assert (site.ask("/content/1").status, "none of its frames" in site.ask("/content/1").json["error"]) == (
                404,
                True,
            )
    assert site.ask("/content/99").status == 404
    assert site.ask("/content/1", sec_fetch_site="cross-site").status == 403
    wrong = site.ask("/search", "POST", b"<script>")
    assert (wrong.status, f"The {medium} cannot be read" in wrong.json["error"]) == (400, True)
    assert next(running, None) is None


def moving(*colours: str) -> bytes:
    """A GIF, four frames a second, which no codec is needed for."""
    frames = [Image.new("RGB", (32, 24), colour) for colour in colours]
    return save(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=250)


FILES = {
    "sound": ("wav", [tone(pitch, rate=8000) for pitch in PITCHES], tone(5000)),
    "clip": ("gif", [moving(*turn) for turn in [*TURNS, ("black", "red")]], moving("lime", "white")),
}


def test_a_folder_follows_its_files(indexed: tuple[str, Path, Path], tmp_path: Path) -> None:
    """Sounds, and videos as moving pictures."""
    medium, model, _ = indexed
    suffix, contents, other = FILES[medium]
    folder, index = tmp_path / "media", tmp_path / "index"
    folder.mkdir()
    for number, content in enumerate(contents):
        (folder / f"{number}.{suffix}").write_bytes(content)
    (folder / "picture.png").touch()
    (folder / f"broken.{suffix}").write_bytes(b"RIFF")

    def run() -> Any:
        return update(index, model, folder_listing(str(folder), *list_folder(str(folder), medium=medium), medium))

    assert (run().embedded, run().kept) == (5, 5)
    (folder / f"0.{suffix}").write_bytes(other)
    assert run().embedded == 1
    searcher = Searcher(index, device="cpu")
    assert datasets.load_from_disk(str(index))["id"] == [f"{at}.{suffix}" for at in range(5)]
    if medium == "sound":
        samples, rate = read_wav(searcher.content(1))
        assert (rate, len(samples)) == (16000, 8000)
        assert searcher.search_file(str(folder / "0.wav"), 1)[0].id == "0.wav"
    else:
        frames, rate = read_avi(searcher.content(1))
        assert (rate, len(frames)) == (4.0, 2)  # each shown for a quarter of a second, as prepared sets keep them
        with Image.open(io.BytesIO(bytes(frames[0]))) as first:
            assert first.getpixel((16, 12)) == pytest.approx((0, 255, 0), abs=8)  # lime, then red
    skipped = [json.loads(line) for line in (index / "skipped.jsonl").read_text().splitlines()]
    assert [(line["id"], line["reason"][:7]) for line in skipped] == [(f"broken.{suffix}", "medium_")]


# -- clips among images ------------------------------------------------------------------------------------------------


def test_a_clip_among_images_is_the_mean_of_its_moments(model: Path, tmp_path: Path) -> None:
    """With a model of images: found by text, by image and by what is similar; shown by its middle; kept by an update."""
    (tmp_path / "library").mkdir()
    colours = ["red", "red", "lime", "lime", "blue", "blue", "white", "white"]
    (tmp_path / "library/one.mp4").write_bytes(clip(colours, (64, 48)))  # AVI inside: files are read by content
    (tmp_path / "library/two.AVI").write_bytes(clip(["red"] * 300, (64, 48)))  # 75 s
    (tmp_path / "library/bad.mov").write_bytes(b"no video")
    for colour in colours[::2]:
        Image.new("RGB", (64, 48), colour).save(tmp_path / f"library/{colour}.png")
    flags = ["--model_name_or_path", str(model), "--images", str(tmp_path / "library")]
    embed.main([*flags, "--index_dir", str(tmp_path / "images")])
    done = embed.main([*flags, "--index_dir", str(tmp_path / "all"), "--with_clips"])
    assert (done["images"], done["skipped"]) == (6, 1)
    images, both = (datasets.load_from_disk(str(tmp_path / name)).with_format("torch") for name in ("images", "all"))
    rows = dict(zip(both["id"][:], both["embedding"][:].float(), strict=True))
    plain = dict(zip(images["id"][:], images["embedding"][:].float(), strict=True))
    assert rows.keys() - plain.keys() == {"one.mp4", "two.AVI"}
    assert all(torch.equal(rows[name], value) for name, value in plain.items())
    mean = torch.nn.functional.normalize(sum(plain.values()), dim=0)
    torch.testing.assert_close(rows["one.mp4"], mean, rtol=0, atol=0.02)  # frames are stored as JPEG
    torch.testing.assert_close(rows["two.AVI"], plain["red.png"], rtol=0, atol=0.02)
    again = embed.main([*flags, "--index_dir", str(tmp_path / "all"), "--with_clips"])
    assert (again["embedded"], again["kept"]) == (0, 6)
    searcher = Searcher(tmp_path / "all", device="cpu")
    assert "two.AVI" in [hit.id for hit in searcher.search_image(Image.new("RGB", (64, 48), "red"), 2)]
    shown = Image.open(io.BytesIO(searcher.large(both["id"][:].index("one.mp4")))).convert("RGB")
    assert shown.getpixel((32, 24))[2] > 200 > 60 > shown.getpixel((32, 24))[1]  # blue
