"""What strangers wrote is data: no code of theirs runs, nothing is written where they say, and no file takes for ever."""

import io
import json
import pickle
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import BertConfig, BertModel

from mm_utils.arguments import arg, parse_args
from mm_utils.data.arguments import DataArguments
from mm_utils.data.batches.sizes import BatchSizes
from mm_utils.data.pairs import load_pairs
from mm_utils.data.streams.stream import open_stream
from mm_utils.model.arguments import ModelArguments
from mm_utils.model.build import build_model, load_model
from mm_utils.model.processor import load_processor, load_processor_of
from scripts.prepare_data import main
from tests.kit.fault_images import draw, png
from tests.kit.jsonl import read_lines, write_lines
from tests.kit.numbered_rows import new_tokenizer
from tests.kit.reading import add_member
from tests.kit.stock_folders import write_stock

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 300,
}


class Canary:
    """Sings, by making its file, when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return open, (str(self.path), "w")

    @property
    def sang(self) -> bool:
        return self.path.exists()


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Canary]:
    """Whoever asks on the terminal whether code may run reads yes."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    canary = Canary(tmp_path / "canary")
    yield canary
    assert not canary.sang


# -- models -------------------------------------------------------------------------------------------------------------

CODE = """
import pathlib
pathlib.Path({path!r}).write_text("sang")
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
class OwnConfig(PreTrainedConfig):
    model_type = {kind!r}
class OwnModel(PreTrainedModel):
    config_class = OwnConfig
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
class OwnProcessor:
    pass
"""
OWN = {
    "AutoConfig": "own.OwnConfig",
    "AutoModel": "own.OwnModel",
    "AutoTokenizer": ["own.OwnTokenizer", "own.OwnTokenizer"],
    "AutoImageProcessor": "own.OwnProcessor",
    "AutoProcessor": "own.OwnProcessor",
}


def write_model_with_code(folder: Path, canary: Canary, kind: str) -> str:
    """A repository as those on the Hub that bring their own classes."""
    folder.mkdir()
    (folder / "own.py").write_text(CODE.format(path=str(canary.path), kind=kind))
    (folder / "config.json").write_text(json.dumps({**SMALL, "model_type": kind, "auto_map": OWN}))
    for name, key in {
        "tokenizer_config.json": "tokenizer_class",
        "preprocessor_config.json": "image_processor_type",
        "processor_config.json": "processor_class",
    }.items():
        (folder / name).write_text(json.dumps({key: "OwnClass", "auto_map": OWN}))
    return str(folder)


DOORS = {
    "--model_name_or_path": load_model,
    "its processor": load_processor_of,
    "--vision_model_name_or_path": lambda name: build_model(
        ModelArguments(vision_model_name_or_path=name), new_tokenizer()
    ),
    "--text_model_name_or_path": lambda name: build_model(
        ModelArguments(text_model_name_or_path=name), new_tokenizer()
    ),
    "its image processor": lambda name: load_processor(ModelArguments(vision_model_name_or_path=name), ["a dog"]),
    "its tokenizer": lambda name: load_processor(ModelArguments(text_model_name_or_path=name), ["a dog"]),
}


@pytest.mark.parametrize("kind", ["marsupial", "bert"])
@pytest.mark.parametrize("door", DOORS)
def test_code_that_a_model_brings_is_not_run(door: str, kind: str, canary: Canary, tmp_path: Path) -> None:
    name = write_model_with_code(tmp_path / "model", canary, kind)
    with pytest.raises(ValueError, match=r"^[^\n]+$") as caught:
        DOORS[door](name)
    assert name in str(caught.value)
    assert not canary.sang
    assert kind == "bert" or not door.startswith("--") or "it needs Python code of its own" in str(caught.value)


def test_compiled_code_that_a_config_names_is_not_fetched(tmp_path: Path) -> None:
    BertModel(BertConfig(**SMALL)).save_pretrained(tmp_path)
    replaced(attn_implementation="someone/attention")(tmp_path)
    with pytest.raises(ValueError, match=r"asks for the attention of someone/attention.*Take attn_implementation out"):
        DOORS["--text_model_name_or_path"](str(tmp_path))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "adapter_model.bin"])
def test_weights_that_are_a_pickle_are_refused(name: str, canary: Canary, tmp_path: Path) -> None:
    BertModel(BertConfig(**SMALL)).save_pretrained(tmp_path / "bert")
    stock = write_stock(tmp_path / "clip", "clip")
    for door, folder in {"--model_name_or_path": stock, "--text_model_name_or_path": tmp_path / "bert"}.items():
        torch.save({"weights": canary}, Path(folder, name))
        if door != "--model_name_or_path":
            DOORS[door](str(folder))  # beside safetensors, it is not read
        Path(folder, "model.safetensors").unlink()
        with pytest.raises(ValueError, match=rf"^[^\n]*no model\.safetensors, but {name}[^\n]*save_pretrained[^\n]*$"):
            DOORS[door](str(folder))


def replaced(**values: Any) -> Callable[[Path], object]:
    """Put values into a configuration."""
    return lambda folder: (folder / "config.json").write_text(
        json.dumps({**json.loads((folder / "config.json").read_text()), **values})
    )


def with_weights(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    path = "model.safetensors"
    return lambda folder: (folder / path).write_bytes(change((folder / path).read_bytes()))


DAMAGE = {
    "cut in half": with_weights(lambda content: content[: len(content) // 2]),
    "a header of an exabyte": with_weights(lambda content: (1 << 60).to_bytes(8, "little") + content[8:]),
    "a function as type": replaced(dtype="__import__"),
    "a word for a number": replaced(hidden_size="wide"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_weights_and_odd_configurations_are_one_line(damage: str, tmp_path: Path) -> None:
    BertModel(BertConfig(**SMALL)).save_pretrained(tmp_path)
    DAMAGE[damage](tmp_path)
    with pytest.raises(ValueError, match=rf"^[^\n]*{tmp_path}[^\n]*$"):
        DOORS["--text_model_name_or_path"](str(tmp_path))


# -- data ---------------------------------------------------------------------------------------------------------------


def prepare(source: object, folder: Path, *flags: str) -> None:
    main(["--sources", str(source), "--output_dir", str(folder), "--num_proc", "1", "--max_bad_fraction", "1", *flags])


def hostile(name: str, canary: Canary) -> bytes:
    """A pickle, in an array where the name is that of one."""
    if not name.endswith("npy"):
        return pickle.dumps(canary)
    np.save(array := io.BytesIO(), np.array([canary], dtype=object), allow_pickle=True)
    return array.getvalue()


def test_no_pickle_in_a_shard_is_read(canary: Canary, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "0.tar", "w") as archive:
        for number, suffix in enumerate(("", "pkl", "pickle", "pyd", "pth", "pt", "joblib", "npy", "npz", "", "")):
            add_member(archive, f"{number}.png", png(draw(number)))
            add_member(archive, f"{number}.txt", b"picture %d" % number)
            if suffix:
                add_member(archive, f"{number}.{suffix}", hostile(suffix, canary))
    prepare(tmp_path / "0.tar", tmp_path / "out")
    faults = read_lines(tmp_path / "out" / "quarantine.jsonl")
    assert [each["reason"] for each in faults] == [*["unsafe_member"] * 6, "not_read"]  # .npy and .npz
    stream = open_stream(DataArguments(train_file=str(tmp_path / "0.tar")), BatchSizes((0,), (2,)), 0, 1, 2)
    read = [caption for row in stream.validation for caption in row["captions"]] + list(stream.captions())
    assert sorted(read) == [f"picture {number}" for number in (0, 10, 7, 8, 9)]


def test_no_pickle_and_no_script_in_a_data_folder_is_read(canary: Canary, tmp_path: Path) -> None:
    """Also not in the schema of a table: pyarrow once unpickled the types of columns (CVE-2023-47248)."""
    columns = {"image": [f"{at}.png" for at in range(6)], "caption": [f"picture {at}" for at in range(6)]}
    for at, name in enumerate(columns["image"]):
        draw(at).save(tmp_path / name)
    write_lines(tmp_path / "pairs.jsonl", pa.table(columns).to_pylist())
    for name in ("pairs.pkl", "dataset.pkl", "state.pkl", "data.pt", "0.npy"):
        (tmp_path / name).write_bytes(hostile(name, canary))
    extension = {"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": pickle.dumps(canary)}
    schema = pa.schema([pa.field("image", pa.string()), pa.field("caption", pa.string(), metadata=extension)])
    pq.write_table(pa.table(columns, schema=schema), tmp_path / "pairs.parquet")
    for name in ("pairs.jsonl", "pairs.parquet"):
        load_pairs(DataArguments(train_file=str(tmp_path / name)))
        prepare(tmp_path / name, tmp_path / f"{name} prepared")
    for name in ("cache.pkl", "state.pkl", "data.pt"):
        (tmp_path / "pairs.jsonl prepared" / name).write_bytes(hostile(name, canary))
    load_pairs(DataArguments(dataset_name=str(tmp_path / "pairs.jsonl prepared")))
    (tmp_path / "own").mkdir()
    (tmp_path / "own/own.py").write_text(f"import pathlib; pathlib.Path({str(canary.path)!r}).write_text('sang')")
    with pytest.raises(ValueError, match=r"^--dataset_name is [^\n]*$"):
        load_pairs(DataArguments(dataset_name=str(tmp_path / "own")))


# -- configuration files ------------------------------------------------------------------------------------------------


@dataclass
class Flags:
    """A few flags."""

    output_dir: str = arg("out", "A folder.")
    max_steps: int = arg(1, "Steps.")


LAUGHS = "a0: &a0 [lol, lol]\n" + "".join(f"a{at}: &a{at} [{', '.join([f'*a{at - 1}'] * 9)}]\n" for at in range(1, 30))
CONFIGS = {
    "a tag that runs a program": ("output_dir: !!python/object/apply:os.system ['touch {canary}']\n", "line 1"),
    "a billion laughs": (LAUGHS + "output_dir: *a29\n", "line 2"),
    "1,000 brackets": ("max_steps: " + "[" * 1000 + "\n", "not valid YAML"),
    "two megabytes": ("# " + "x" * (2 << 20) + "\n", "bytes"),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_hostile_or_mistaken_config_ends_in_one_line(
    kind: str, canary: Canary, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, wanted = CONFIGS[kind]
    path = tmp_path / "config.yaml"
    path.write_text(text.replace("{canary}", str(canary.path)))
    with pytest.raises(SystemExit) as ended:
        parse_args(Flags, argv=["--config", str(path)])
    assert ended.value.code == 2
    message = capsys.readouterr().err.split("error: ")[-1].rstrip("\n")
    assert "\n" not in message
    assert str(path) in message
    assert wanted in message


# -- runs ---------------------------------------------------------------------------------------------------------------
