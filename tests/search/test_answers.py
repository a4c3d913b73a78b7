"""Answers equal a plain product over all images; the head reorders only where it helps; copies are folded; parts are searched alone."""

import io
import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from PIL import ExifTags, Image
from torch.nn import functional as F

from mm_utils.data.images import open_image
from mm_utils.data.media.pictures import picture
from mm_utils.model.build import load_model
from mm_utils.model.reading import UnreadableError
from mm_utils.search.index import open_index, write_info
from mm_utils.search.listing import Listing, folder_listing, pair_listing
from mm_utils.search.searcher import Searcher, best
from mm_utils.search.updating import update_index
from scripts import search
from tests.kit.media_files import clip, media_rows, tone
from tests.kit.models import save_model
from tests.search.conftest import make_embedder, update, write_photos

QUERY = "a red circle, number 1"


@pytest.fixture(scope="module")
def searcher(index: Path) -> Searcher:
    return Searcher(index, device="cpu")


def plain(model: Path, photos: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Return by id the cosine of every picture with the query, and its score after re-ranking, by the model's own methods."""
    loaded = load_model(str(model)).eval()
    files = sorted(photos.rglob("*.png"))
    names = [path.relative_to(photos).as_posix() for path in files]
    images, texts = loaded.encode(images=files, texts=[QUERY])
    cosine = dict(zip(names, (images @ texts[0]).tolist(), strict=True))
    return cosine, {names[place]: score for place, score in loaded.rerank(QUERY, files)}


def test_text_is_scored_as_by_the_model(searcher: Searcher, model: Path, photos: Path) -> None:
    hits = searcher.search_text(QUERY, 30)
    assert {hit.id: hit.score for hit in hits} == pytest.approx(plain(model, photos)[0], abs=2e-3)
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
    assert [hit.rank for hit in hits] == list(range(1, 31))
    assert all(hit.reranked is None for hit in hits)
    assert not searcher.reranks
    assert searcher.search_text(QUERY, 7) == hits[:7]


def test_an_image_finds_itself_first(searcher: Searcher) -> None:
    for row in (0, 13, 29):
        own = searcher.search_text(QUERY, 30)[row]
        hits = searcher.search_image(open_image({"bytes": None, "path": own.path}), 3)
        assert (hits[0].row, hits[0].score) == (own.row, pytest.approx(1, abs=1e-3))
        for file in (own.path, Path(own.path).read_bytes()):
            [same], others = searcher.look_up(file, 30)
            assert same == hits[0]
            assert [hit.row for hit in others] == [
                hit.row for hit in searcher.search_image(open_image({"path": own.path}), 30)[1:]
            ]
        near = searcher.similar(row, 29)
        assert row not in [hit.row for hit in near]
        assert len(near) == 29
    for use in (searcher.similar, searcher.large, lambda row: searcher.stored(row, "thumbnail")):
        for row in (30, -1):
            with pytest.raises(IndexError, match="the index has 30 images"):
                use(row)


def test_the_head_reorders_the_first_hits(index: Path, reranking_model: Path, photos: Path) -> None:
    reranking = Searcher(index, str(reranking_model), rerank_top_k=8, device="cpu")
    _, combined = plain(reranking_model, photos)
    before = reranking.search_text(QUERY, 30, rerank=False)
    hits = reranking.search_text(QUERY, 30)
    assert reranking.reranks
    assert [hit.id for hit in hits[8:]] == [hit.id for hit in before[8:]]
    assert [hit.id for hit in hits[:8]] == sorted((hit.id for hit in before[:8]), key=lambda name: -combined[name])
    assert [hit.reranked for hit in hits[:8]] == pytest.approx([combined[hit.id] for hit in hits[:8]], abs=4e-3)
    assert [hit.id for hit in hits] != [hit.id for hit in before]
    assert reranking.search_text(QUERY, 3) == hits[:3]


def test_a_file_that_is_gone_is_reranked_by_its_thumbnail(reranking_model: Path, tmp_path: Path) -> None:
    write_photos(tmp_path / "photos", range(6))
    update(tmp_path / "index", reranking_model, tmp_path / "photos")
    found = Searcher(tmp_path / "index", device="cpu")
    before = {hit.id: hit.reranked for hit in found.search_text(QUERY)}
    (tmp_path / "photos/0/000.png").unlink()
    os.replace(tmp_path / "photos/1/001.png", tmp_path / "photos/0/002.png")  # another picture in its place
    after = {hit.id: hit.reranked for hit in found.search_text(QUERY)}
    assert after == pytest.approx(before, abs=0.5)
    assert after["0/000.png"] != before["0/000.png"]
    assert after["0/004.png"] == before["0/004.png"]


@pytest.mark.parametrize(
    ("text", "wanted", "off"),
    [
        ("a red circle -blue", "a red circle", "blue"),
        ("-blue a red -Square circle", "a red circle", "blue Square"),
        ("dog -black-cat", "dog", "black-cat"),
        *(
            (text, text, "")
            for text in ("SKU-10001", "a well-known dog", "a dog - a cat", "at -5 degrees", "a --dog-")
        ),
    ],
)
def test_words_behind_a_hyphen_are_taken_off(
    text: str, wanted: str, off: str, index: Path, reranking_model: Path
) -> None:
    found = Searcher(index, str(reranking_model), device="cpu")
    query, *others = load_model(str(reranking_model)).eval().encode(texts=[wanted, *([off] if off else [])])
    query = F.normalize(query - 0.5 * others[0] if others else query, dim=0)
    right = torch.tensor(open_index(index)[1]["embedding"][:]) @ query
    hits = found.search_text(text, 30)
    assert {hit.row: hit.score for hit in hits} == pytest.approx(dict(enumerate(right.tolist())), abs=1e-4)
    assert {hit.reranked is None for hit in hits[:10]} == {bool(off)}
    assert {hit.fits is None for hit in hits} == {bool(off)}


def test_a_line_says_where_nothing_fits(
    index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index keeps the score that texts without meaning reach; one that is above all scores, or below, decides the line.

    Of few images it says nothing.
    """
    kept = Searcher(index, device="cpu")
    assert kept.info.level == pytest.approx(kept.level())
    shutil.copytree(index, tmp_path / "index")
    for level, least, fits in ((2.0, 30, False), (-2.0, 30, True), (None, 30, None), (2.0, 31, None)):
        monkeypatch.setattr("mm_utils.search.searcher.LEAST_LEVEL", least)
        write_info(tmp_path / "index", replace(kept.info, level=level))
        search.main(["--index_dir", str(tmp_path / "index"), QUERY])
        said = "Perhaps nothing fits: 1 of 100 texts of random letters reaches 2.000, too."
        assert (said in capsys.readouterr().out) is (fits is False)
        search.main(["--index_dir", str(tmp_path / "index"), QUERY, "--json"])
        assert {json.loads(line)["fits"] for line in capsys.readouterr().out.splitlines()} == {fits}


CAPTIONS = [["A dog runs."], ["The dog, and a dog!"], [], ["a CAT", "a dog sleeps"], ["ein Hund"], ["A dog runs."]]


@pytest.fixture(scope="module")
def captioned(reranking_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of 24 pictures, the first of which have captions."""
    folder = tmp_path_factory.mktemp("captioned")
    write_photos(folder / "photos", range(24))
    listing = folder_listing(str(folder / "photos"))
    rows = {"image": listing.rows["image"][:], "captions": [*CAPTIONS, *[[]] * 18]}
    listing = Listing(listing.ids, datasets.Dataset.from_dict(rows, listing.rows.features))
    embedder = make_embedder(reranking_model)
    accelerator = Accelerator(cpu=True)
    update_index(folder / "index", str(reranking_model), listing, embedder, accelerator)
    return folder / "index"


@pytest.mark.parametrize(("read", "few"), [(True, 4), (True, 30), (False, 4)])
def test_captions_count_twice_beside_the_images(
    captioned: Path, read: bool, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores are over the whole index, whatever part is searched; of a few with captions they are plain cosines."""
    monkeypatch.setattr("mm_utils.search.searcher._FEW", few)
    found = Searcher(captioned, device="cpu", read_captions=read)
    model = load_model(found.info.model).eval()
    rows = open_index(captioned)[1]
    text = model.encode(texts=["a dog runs"])[0].numpy()
    images = np.array(rows["embedding"], np.float32)
    cosine = images @ text
    score = cosine.copy()
    has = [row for row, each in enumerate(CAPTIONS) if each]
    for row in has if read else ():
        mean = model.encode(texts=CAPTIONS[row]).mean(0).numpy()
        both = images[row] + 2 * mean / np.linalg.norm(mean)
        score[row] = both @ text / np.linalg.norm(both)
    if read and few == 4:
        others = np.delete(score, has)
        spread = others.std() / score[has].std()
        score[has] = others.mean() - 0.15 * others.std() + (score[has] - score[has].mean()) * spread
    for folder in ("", "0"):
        there = [row for row in range(24) if rows[row]["id"].startswith(folder)]
        before = found.within(folder).search_text("a dog runs", 24, rerank=False)
        assert {hit.row: hit.score for hit in before} == pytest.approx({row: score[row] for row in there}, abs=2e-3)
        assert {hit.row: hit.cosine for hit in before} == pytest.approx({row: cosine[row] for row in there}, abs=1e-5)
        assert [hit.score for hit in before] == sorted((hit.score for hit in before), reverse=True)
        assert found.within(folder).search_text("a dog runs", 7, rerank=False) == before[:7]


def test_a_code_finds_the_images_that_have_it_first(captioned: Path) -> None:
    """In an id or in a caption, as a word of its own, in any case."""
    found = Searcher(captioned, device="cpu")
    for text, name in (("003", "003.png"), ("003.PNG", "003.png"), ("dog-7a", "")):
        hits = found.search_text(text, 24, rerank=False)
        own = [hit for hit in hits if hit.score > 1]
        assert hits[: len(own)] == own
        assert [hit.id.rpartition("/")[2] for hit in own] == [name] * bool(name)
    assert all(hit.score < 1 for hit in found.search_text("a dog 003", 24))


def test_equal_scores_keep_the_order_of_the_index() -> None:
    scores = torch.tensor([0.5, 0.7, 0.5, 0.7, 0.5])
    for k in (1, 2, 3, 4, 5, 50):
        assert best(scores, k) == [1, 3, 0, 2, 4][:k]


# -- a part of an index, copies, and the script ------------------------------------------------------------------------

FILTERS = [  # a filter, and which of 30 pictures it lets through: picture n lies in folder n % 2, taken on day n of May
    ({"folder": "1"}, lambda n: n % 2 == 1),
    ({"folder": "/0/"}, lambda n: n % 2 == 0),
    ({"since": "2024-05-10"}, lambda n: n >= 9),
    ({"until": "2024-05-10"}, lambda n: n <= 9),
    ({"since": "2024-05-03", "until": "2024-05-03"}, lambda n: n == 2),
    ({"folder": "1", "since": "2024-05", "until": "2024-05-20"}, lambda n: n % 2 == 1 and n <= 19),
    ({"since": "1901", "until": "2024-05"}, lambda n: True),
    ({"until": "2023"}, lambda n: False),
]


@pytest.fixture(scope="module")
def dated(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The index of 30 pictures with dates, of which the last is one of the first, larger."""
    folder = tmp_path_factory.mktemp("dated")
    write_photos(folder / "photos", range(29))
    with Image.open(folder / "photos/0/008.png") as image:
        image.resize((image.width * 3, image.height * 3)).save(folder / "photos/1/029.png")
    for path in folder.glob("photos/*/*.png"):
        exif = Image.Exif()
        number = int(path.stem)
        taken = f"2024:05:{1 + number:02d} 23:59:00"
        exif[ExifTags.Base.DateTime] = taken if number % 2 else "2025:01:01 00:00:00"  # else it is that of an edit
        if number % 2 == 0:
            exif[ExifTags.IFD.Exif] = {ExifTags.Base.DateTimeOriginal: taken}
        with Image.open(path) as image:
            image.save(path, exif=exif)
    update(folder / "index", model, folder / "photos")
    return folder / "index"


def test_a_part_is_searched_as_the_whole_is(dated: Path, capsys: pytest.CaptureFixture) -> None:
    searcher = Searcher(dated, device="cpu")
    every = {hit.id: hit for hit in searcher.search_text(QUERY, 30)}
    cosine = plain(Path(searcher.info.model), dated.parent / "photos")[0]
    for part, fits in FILTERS:
        right = sorted((name for name in cosine if fits(int(name[2:5]))), key=lambda name: -cosine[name])
        found = searcher.within(**part)
        hits = found.search_text(QUERY, 30)
        assert found.searched == len(right), part
        assert sorted(name for hit in hits for name in (hit.id, *hit.copies)) == sorted(right), part
        assert [hit.score for hit in hits if hit.id in every] == [
            every[hit.id].score for hit in hits if hit.id in every
        ]
        assert found.search_text(QUERY, 2) == hits[:2]
        assert {hit.id for hit in found.similar(3, 30)} <= set(right)
    command = ["--index_dir", str(dated), QUERY, "--json", "--top_k", "30", "--since", "2024-05"]
    search.main([*command, "--folder", "1", "--until", "2024-05-20"])
    expected = searcher.within("1", "2024-05", "2024-05-20").search_text(QUERY, 30)
    assert [json.loads(line)["id"] for line in capsys.readouterr().out.splitlines()] == [hit.id for hit in expected]
    with pytest.raises(ValueError, match=r"let no image of .* through"):
        search.main(["--index_dir", str(dated), QUERY, "--until", "2023"])


def test_what_has_no_day_is_left_out_of_days_and_counted(
    dated: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture
) -> None:
    write_photos(tmp_path / "photos", range(40, 44))
    shutil.copy(dated.parent / "photos/1/001.png", tmp_path / "photos/1")
    Image.new("RGB", (40, 30)).save(tmp_path / "photos/1/garbled.jpg", exif=b"Exif\0\0garbage" * 3)
    update(tmp_path / "index", model, tmp_path / "photos")
    with caplog.at_level("INFO"):
        search.main(["--index_dir", str(tmp_path / "index"), QUERY, "--since", "2024", "--folder", "1", "--json"])
    [hit] = map(json.loads, capsys.readouterr().out.splitlines())
    assert (hit["id"], hit["day"]) == ("1/001.png", "2024-05-02")
    assert "3 images have no day and are left out" in caplog.text


def test_what_cannot_be_searched_for_is_named(searcher: Searcher) -> None:
    for wrong in ("yesterday", "2024-13", "2024-02-30", "24-01-01", "0000"):
        with pytest.raises(ValueError, match=f"--since is {wrong}; .* Give a day such as 2024-05-31"):
            searcher.within(since=wrong)
    with pytest.raises(ValueError, match="--since and --until ask for days; no image of the index has one"):
        searcher.within(until="2024")
    with pytest.raises(ValueError, match="--folder is 00; the index has folders such as 0, 1"):
        searcher.within("00")
    with pytest.raises(ValueError, match="The text is blank"):
        searcher.search_text(" \n")
    with pytest.raises(ValueError, match="The text only says what to leave out, cat dog; "):
        searcher.search_text("-cat -dog")
    with pytest.raises(ValueError, match="There are 0 of a text"):
        search.main(["--index_dir", "index", " "])
    with pytest.raises(ValueError, match=r"--image is gone\.jpg; there is no such file"):
        search.main(["--index_dir", "index", "--image", "gone.jpg"])


def test_near_copies_are_one_hit_and_are_listed(dated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    searcher = Searcher(dated, device="cpu")
    pair = {"0/008.png", "1/029.png"}
    hits = searcher.search_text(QUERY, 30)
    assert [{hit.id, *hit.copies} for hit in hits if hit.copies] == [pair]
    assert (len(hits), [hit.rank for hit in hits]) == (29, list(range(1, 30)))
    for count in (1, 5, 28):
        assert [hit.id for hit in searcher.search_text(QUERY, count)] == [hit.id for hit in hits[:count]]
    search.main(["--index_dir", str(dated), "--copies", "--json"])
    [line] = capsys.readouterr().out.splitlines()
    assert {each["id"] for each in json.loads(line)} == pair
    search.main(["--index_dir", str(dated), "--copies"])
    assert str(dated.parent / "photos/1/029.png") in capsys.readouterr().out
    search.main(["--index_dir", str(dated), "--copies", "--folder", "1"])
    assert capsys.readouterr().out == "No picture occurs twice; a copy that was cropped or shifted may be missed\n"
    with pytest.raises(ValueError, match="--top_k is 3"):
        search.main(["--index_dir", str(dated), "--copies", "--top_k", "3"])


def test_copies_of_a_copy_are_in_the_same_hit(model: Path, tmp_path: Path) -> None:
    write_photos(tmp_path / "photos", range(9))
    picture = tmp_path / "photos/0/008.png"
    same = {"0/008.png", "1/again.png", "1/once_more.png", "0/large.png"}
    for name in ("again", "once_more"):
        shutil.copy(picture, tmp_path / f"photos/1/{name}.png")
    with Image.open(picture) as image:
        image.resize((image.width * 3, image.height * 3)).save(tmp_path / "photos/0/large.png")
    update(tmp_path / "index", model, tmp_path / "photos")
    searcher = Searcher(tmp_path / "index", device="cpu")
    assert [{each["id"] for each in group} for group in searcher.copies()] == [same]
    of_files = [searcher.search_image(Image.open(tmp_path / "photos" / name), 6) for name in same]
    for hits in (*of_files, searcher.search_text(QUERY, 9)):
        assert [{hit.id, *hit.copies} for hit in hits if hit.id in same] == [same]


def test_the_script_prints_a_table_and_json(index: Path, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    search.main(["--index_dir", str(index), QUERY, "--top_k", "3"])
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["rank", "score", "image"]
    assert [line.split()[0] for line in table[1:4]] == ["1", "2", "3"]
    search.main(["--index_dir", str(index), "--query", QUERY, "--top_k", "3", "--json"])
    hits = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [hit["path"] for hit in hits] == [line.split()[2] for line in table[1:4]]
    search.main(["--index_dir", str(index), "--image", str(photos / "0/004.png"), "--json"])
    found = [json.loads(line)["id"] for line in capsys.readouterr().out.splitlines()]
    assert len(found) == 10
    assert "0/004.png" not in found  # it is what is searched for


# -- sounds, clips, and clips beside images ----------------------------------------------------------------------------

TURNS = [("red", "lime"), ("lime", "red"), ("blue", "white"), ("white", "blue")]
CONTENTS = {
    "sound": [tone(pitch, 0) for pitch in (200, 400, 800, 1600, 3200)],
    "clip": [clip([a, a, b, b]) for a, b in TURNS],
}


@pytest.mark.parametrize("medium", CONTENTS)
def test_an_index_of_sounds_or_clips(medium: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores are those of the model with the stored files, which the index keeps and shows; a file finds its like."""
    folder = save_model(tmp_path / "model", medium)
    media = CONTENTS[medium]
    embedder = make_embedder(folder, 4)
    listing = pair_listing({"train": media_rows(medium, media)})
    update_index(tmp_path / "index", str(folder), listing, embedder, Accelerator(cpu=True))
    found = Searcher(tmp_path / "index", device="cpu", read_captions=False)
    assert found.info.medium == medium
    assert open_index(tmp_path / "index")[1]["content"] == media
    for row, content in enumerate(media):
        with Image.open(io.BytesIO(found.stored(row, "thumbnail"))) as thumbnail:
            assert thumbnail.size == picture({"bytes": content}, medium).size
    shown = [embedder.medium.read({"bytes": content, "path": None}, None)[0] for content in media]
    with torch.no_grad():
        embeds, keys_values = found._model.encode_image(embedder.medium.features(torch.stack(shown)))
        ids, mask = found._model.text_inputs(["a low tone"])
        text, states = found._model.encode_text(ids, mask)
        head = found._model.head_scores(keys_values, states, mask, ids)
    cosine = (embeds @ text[0]).tolist()
    scale = found._model.logit_scale.exp().item()
    for hit in found.search_text("a low tone", 5):
        assert hit.score == pytest.approx(cosine[hit.row], abs=2e-3)
        assert hit.reranked == pytest.approx(cosine[hit.row] + head[hit.row].item() / scale, abs=4e-3)
    assert 2 not in [hit.row for hit in found.similar(2)]
    if medium == "clip":
        with pytest.raises(UnreadableError, match="found by texts"):
            found.search_file(media[0])
        return
    (tmp_path / "query.wav").write_bytes(media[3])
    for file in (media[3], str(tmp_path / "query.wav")):
        [own], others = found.look_up(file)
        assert found.search_file(file) == others
        assert (own.row, own.score) == (3, pytest.approx(1, abs=2e-3))
        assert 3 not in [hit.row for hit in others]
    # No codec opens a stranger's file: a WAV file may hold MP3 and much else
    monkeypatch.setitem(sys.modules, "av", None)
    compressed = bytearray(media[0])
    compressed[20:22] = (0x55).to_bytes(2, "little")
    for wrong in (bytes(compressed), b"OggS" + bytes(99), media[3][:99], b"", tone(0), str(tmp_path / "nowhere.wav")):
        with pytest.raises(UnreadableError):
            found.search_file(wrong)
