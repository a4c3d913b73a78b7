"""A caption's cosine and its place among other images are what plain loops find; what scores low is set aside by name."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.nn.functional import normalize

from mm_utils.extras.data_reports import pair_scores
from mm_utils.extras.data_reports.pair_scores import FILE, SHEET, compare
from mm_utils.extras.data_reports.preparing import verify
from scripts import prepare_data
from tests.kit.models import save_model
from tests.kit.prepared import quarantine_of, report_of

IMAGES = 12


def embedded(images: int, noise: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images with one to three captions near them."""
    generator = torch.Generator().manual_seed(0)
    owner_T = torch.arange(images).repeat_interleave(torch.randint(1, 4, (images,), generator=generator))
    image_ME = normalize(torch.randn(images, 16, generator=generator, dtype=torch.float64), dim=1)
    text_TE = image_ME[owner_T] + noise * torch.randn(len(owner_T), 16, generator=generator, dtype=torch.float64)
    return image_ME, normalize(text_TE, dim=1), owner_T


@pytest.mark.parametrize("reference", [1000, 7])
def test_scores_are_those_of_plain_loops(reference: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pair_scores, "REFERENCE", reference)
    monkeypatch.setattr(pair_scores, "_BLOCK", 8)
    image_ME, text_TE, owner_T = embedded(30, 1.0)
    cosine_T, closer_T = compare(image_ME, text_TE, owner_T)
    sample = range(30) if reference > 30 else [int(29 * at / 6) for at in range(7)]
    for caption, owner in enumerate(owner_T.tolist()):
        cosines = {image: float(image_ME[image] @ text_TE[caption]) for image in {*sample, owner}}
        others = [image for image in sample if image != owner]
        assert cosine_T[caption].item() == pytest.approx(cosines[owner])
        share = sum(cosines[image] > cosines[owner] for image in others) / len(others)
        assert closer_T[caption].item() == pytest.approx(share)


def test_captions_of_other_images_are_the_worst():
    image_ME, text_TE, owner_T = embedded(200, 0.2)
    wrong = torch.randperm(len(owner_T), generator=torch.Generator().manual_seed(1))[:20]
    owner_T = owner_T.index_copy(0, wrong, (owner_T[wrong] + 100) % 200)
    closer_T = compare(image_ME, text_TE, owner_T)[1]
    assert set(closer_T.topk(20).indices.tolist()) >= set(wrong[closer_T[wrong] > 0.1].tolist())
    assert (closer_T[wrong] > 0.1).sum() >= 15


def test_a_data_set_is_scored_and_what_scores_low_is_set_aside(tmp_path: Path):
    rows = []
    for row in range(IMAGES):
        Image.effect_noise((80, 80), 40 + row).convert("RGB").save(tmp_path / f"{row}.png")
        captions = [f"picture number {row} of some noise", f"grey noise, the {row}th of twelve"]
        rows.append({"id": f"row{row}", "image": f"{row}.png", "captions": captions})
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    model = str(save_model(tmp_path / "model", "image"))

    def prepare(name: str, *flags: str) -> tuple[Path, list[dict]]:
        folder = tmp_path / name
        words = ["--sources", f"{file},id_column=id", "--output_dir", str(folder), "--num_proc", "1"]
        prepare_data.main([*words, "--score_with", model, *flags])
        lines = (folder / FILE).read_text(encoding="utf-8").splitlines()
        return folder, [json.loads(line) for line in lines]

    with pytest.raises(ValueError, match=r"--score_with is .*there is no such folder"):
        prepare("typo", "--score_with", str(tmp_path / "nowhere"))
    assert not list(tmp_path.glob("typo*"))  # nothing was read
    folder, scores = prepare("all")
    assert not list(folder.rglob("cache-*"))
    assert sorted((each["id"], each["caption"]) for each in scores) == sorted(
        (row["id"], caption) for row in rows for caption in range(2)
    )
    assert (folder / SHEET).stat().st_size > 1000
    assert FILE in (folder / "report.md").read_text(encoding="utf-8")

    best = {row["id"]: max(each["cosine"] for each in scores if each["id"] == row["id"]) for row in rows}
    least = sorted(best.values())[IMAGES // 2]
    low = {name for name, cosine in best.items() if cosine < least - 1e-3}
    folder, kept = prepare("kept", "--min_pair_score", f"{least - 1e-3}")
    assert low
    assert {each["id"] for each in kept} == set(best) - low
    assert {fault["raw"] for fault in quarantine_of(folder) if fault["reason"] == "low_pair_score"} == low
    assert verify(str(folder)) == sum(split["images"] for split in report_of(folder)["splits"].values())
    cosines = {(each["id"], each["caption"]): each["cosine"] for each in scores}
    for each in kept:
        assert each["cosine"] == pytest.approx(cosines[each["id"], each["caption"]], abs=2e-4)

    with pytest.raises(ValueError, match="--min_pair_score is 1; no pair reaches it"):
        prepare("none", "--min_pair_score", "1")
    assert not (tmp_path / "none").exists()


def test_a_least_score_needs_a_model(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        prepare_data.main(["--sources", "pairs.jsonl", "--output_dir", "out", "--min_pair_score", "0.2"])
    assert "--min_pair_score is 0.2; there are no scores" in capsys.readouterr().err
