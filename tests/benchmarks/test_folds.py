"""The accuracy over folds: the guessed class, the interval over groups, and which rows are right."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks import folds
from benchmarks.folds import FoldsArguments, nearest_class, report


def test_the_guess_is_the_class_whose_captions_have_the_nearest_mean() -> None:
    captions = torch.tensor([[3.0, 0.0], [0.0, 1.0], [0.0, -5.0]])  # of lengths that play no part
    media = torch.tensor([[2.0, 1.9], [0.1, -1.0]])
    assert nearest_class(media, captions, torch.tensor([0, 0, 1])).tolist() == [0, 1]


def test_rows_of_a_recording_are_one_draw() -> None:
    rows = [{"fold": 1 + place % 2, "recording": place // 4} for place in range(8)]
    results = [
        {"fold": fold, "seed": seed, "right": right}
        for fold, seed, right in (
            (1, 0, [1, 1, 0, 0]),
            (1, 1, [1, 1, 0, 1]),
            (2, 0, [1, 1, 0, 0]),
            (2, 1, [1, 1, 0, 0]),
        )
    ]
    grouped = report(results, rows, FoldsArguments(group_column="recording"))
    alone = report(results, rows, FoldsArguments())
    assert grouped.splitlines()[2] == "| 1 | 0.625 ± 1.588 | 4 | 2 |"
    assert grouped.endswith("Accuracy 0.562 ± 0.857: 8 rows of 2 groups.")  # half of it from one recording
    assert alone.endswith("Accuracy 0.562 ± 0.343: 8 rows of 8 groups.")


def test_a_row_is_right_if_its_own_captions_are_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    media = torch.tensor([[0.0, 2.0], [1.0, 9.0], [3.0, 1.0]])  # of rows 2, 1 and 0, whose keys are 12, 11 and 10
    keys = {"image_key_M": torch.tensor([12, 11, 10]), "caption_key_T": torch.tensor([10, 11, 12])}
    split = SimpleNamespace(image_ME=media, text_TE=texts, rows_M=torch.tensor([2, 1, 0]), **keys)
    monkeypatch.setattr(folds, "embed_split", lambda *_: split)
    guesses = folds.Guesses([0, 1, 0])
    assert guesses(None, [], None) == {"class_accuracy": pytest.approx(2 / 3)}
    assert guesses.right == [True, True, False]
    with pytest.raises(ValueError, match="has 2 rows of a fold, and 3 can be read"):
        folds.Guesses([0, 1])(None, [], None)
