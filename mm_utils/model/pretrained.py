"""Load pretrained configurations and backbones, and check what was loaded.

Reading a pickle (`pytorch_model.bin`) can run any code, and so can the Python files of a model repository. Only safetensors are
read, and no Python code of others; `transformers` would ask on the terminal whether to run it.
"""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import constants, try_to_load_from_cache
from torch import nn
from transformers import (
    MODEL_MAPPING,
    AutoConfig,
    AutoModel,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from mm_utils.files import SUMS_FILE, changed_since_sums
from mm_utils.places import missing, use_cache_without_network
from mm_utils.text import one_line

logger = logging.getLogger(__name__)

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_EMBEDS = ("vision_model", "visual_projection", "text_model", "text_projection", "audio_model", "audio_projection")
_SOUND_PARTS = {"whisper": "encoder", "clap": "audio_model"}  # what a model has besides its sound tower is left out


def load_tower(name: str, tower: str) -> tuple[PreTrainedModel, str]:
    """Load a backbone; return it with its pooling: `auto`, or `mean` if the checkpoint holds no weights of its pooler.

    `name` is a folder or a Hub id; of a two-tower checkpoint, the `vision` or the `text` tower is taken.

    Raises:
        ValueError: if there is no such backbone, or it lacks weights.
    """
    flag = f"--{tower}_model_name_or_path is {name}"
    config = load_config(flag, name)
    if tower == "vision" and config.model_type in _SOUND_PARTS:
        part = _SOUND_PARTS[config.model_type]
    else:
        config = getattr(config, f"{tower}_config", config)
        part = ""
    if type(config) not in MODEL_MAPPING:
        raise ValueError(f"{flag}; AutoModel knows no {config.model_type}. Choose another backbone.")
    model, missing = load_weights(AutoModel, flag, name, config=config, dtype="float32")
    if part:
        model = getattr(model, part)
        missing = [key.removeprefix(f"{part}.") for key in missing if key.startswith(f"{part}.")]
    if len(missing) == len(model.state_dict()):
        raise ValueError(
            f"{flag}; it holds no weights of a {config.model_type}. Choose a checkpoint of that backbone."
        )
    # The token in place of masked patches takes no part.
    if lacking := [key for key in missing if "pooler" not in key and "mask" not in key]:
        raise ValueError(
            f"{flag}; it lacks {len(lacking)} weights of a {config.model_type}, such as {lacking[0]}, and random ones would "
            "take their place. Choose another checkpoint."
        )
    without_pooler = any("pooler" in key for key in missing)
    if without_pooler:
        logger.info("%s; it holds no weights of a pooler, so its outputs are pooled by their mean", flag)
    return model, "mean" if without_pooler else "auto"


def load_weights(kind: Any, what: str, name: str, **options: Any) -> tuple[Any, list[str]]:
    """Load a model by the class `kind`; return it, and the names of weights that its checkpoint lacks.

    Args:
        what: begins error messages.
        options: those of `from_pretrained`.

    Raises:
        ValueError: if it cannot be loaded, as `explained` says it, or a weight is not finite.
    """
    with explained(what, name):
        model, info = kind.from_pretrained(
            name, trust_remote_code=False, use_safetensors=True, output_loading_info=True, **options
        )
    _check_weights(name, model)
    return model, sorted(info["missing_keys"])


def _check_weights(name: str, model: nn.Module) -> None:
    """Raise ValueError if a loaded weight is not finite, or if all weights of a tower or a projection are zero: 0.5 s a GB."""
    file = Path(name) / "model.safetensors"
    where = str(file if file.is_file() else name)
    highest = dict[str, float]()
    advice = (
        "no figure can come of it. Take an earlier checkpoint, or train again with a lower --learning_rate or in fp32."
    )
    for weight, values in model.named_parameters():
        ends = values.detach().aminmax()  # one pass, and a NaN comes out of it
        low = ends.min.item()
        high = ends.max.item()
        if not (math.isfinite(low) and math.isfinite(high)):
            raise ValueError(f"The weight {weight} in {where} is not finite; {advice}")
        part = weight.partition(".")[0]
        if values.dim() > 1 and part in _EMBEDS:
            highest[part] = max(highest.get(part, 0.0), -low, high)
    for part, value in highest.items():
        if value == 0:
            raise ValueError(f"All weights of {part} in {where} are 0; {advice}")


def complete(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Let a tokenizer pad, with its last token if need be, return masks, and take special tokens for text; return it.

    Raises:
        ValueError: if it has no words, which is how some classes load from a folder without a tokenizer.
    """
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        raise ValueError("its tokenizer has no words")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if "attention_mask" not in tokenizer.model_input_names:
        set_outputs(tokenizer, [*tokenizer.model_input_names, "attention_mask"])
    if tokenizer.is_fast:  # the first is saved, for pipelines and others that open the folder
        tokenizer.init_kwargs["split_special_tokens"] = tokenizer.split_special_tokens = True
    return tokenizer


def cut_texts_at(tokenizer: PreTrainedTokenizerBase, most: int) -> None:
    """Let a tokenizer cut texts at so many tokens, also where it is saved and a processor of transformers calls it."""
    tokenizer.model_max_length = most
    tokenizer.init_kwargs.pop("max_length", None)  # sentence-transformers' files have one, which would go before


def set_outputs(tokenizer: PreTrainedTokenizerBase, names: list[str]) -> None:
    """Set what a tokenizer returns, now and where it is saved."""
    tokenizer.model_input_names = tokenizer.init_kwargs["model_input_names"] = names


def check_words(what: str, tokenizer: Any, words: int) -> None:
    """Raise ValueError if a tokenizer gives ids that a text encoder of so many words lacks.

    Special tokens that no text gets are left out: of some published models they lie beyond the embedding.
    """
    added = tokenizer.get_added_vocab()
    ids = [place for word, place in tokenizer.get_vocab().items() if word not in added]
    highest = max(*ids, *tokenizer("a")["input_ids"], tokenizer.pad_token_id or 0)
    if highest >= words:
        raise ValueError(
            f"{what}; its tokenizer has ids up to {highest:,}, and its text encoder has {words:,} words. Take the tokenizer that "
            "the encoder was trained with."
        )


@contextmanager
def explained(what: str, name: str) -> Iterator[None]:
    """Turn any error of `from_pretrained(name)` into a ValueError that begins with `what` and says what to do."""
    if not Path(name).is_dir():
        if problem := missing(name):
            raise ValueError(f"{what}; {problem}")
        use_cache_without_network()
    try:
        yield
    except Exception as error:  # odd values in a config.json raise AttributeError, KeyError, ImportError ...
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"{what}; it needs Python code of its own, and no code of others is run. Choose a model whose class is in "
                "transformers."
            ) from error
        pickles = [path.name for path in sorted(Path(name).glob("*")) if path.suffix in _PICKLES]
        if "safetensors" in str(error) and (pickles or not Path(name).is_dir()):
            raise ValueError(
                f"{what}; it has no model.safetensors{f', but {pickles[0]}' if pickles else ''}, and pickles, which can "
                "run any code, are not read. Convert it where nothing can be lost: "
                "AutoModel.from_pretrained(...).save_pretrained(...)."
            ) from error
        if type(error).__name__ == "SafetensorError":
            raise ValueError(
                f"{what}; its weights are damaged or not whole ({one_line(error)}). Copy or download them again."
            ) from error
        if "ignore_mismatched_sizes" in str(error):
            raise ValueError(
                f"{what}; its weights have other shapes than its config.json says, as the table above shows. Take the "
                "config.json that they were saved with."
            ) from error
        is_away = not Path(name).is_dir() and not isinstance(try_to_load_from_cache(name, "config.json"), str)
        if is_away and ("couldn't connect" in str(error) or constants.HF_HUB_OFFLINE):
            raise ValueError(
                f"{what}; it is not on this machine, and the Hub cannot be reached. Give the path of a folder that holds a copy."
            ) from error
        raise ValueError(f"{what}; it cannot be loaded: {one_line(error)}") from error


def _what_it_is(folder: Path) -> str:
    """Return what a folder without a config.json holds, and what to give instead."""
    if (folder / "adapter_config.json").is_file():
        return "this folder holds an adapter of PEFT and not its model. Merge both by merge_and_unload(), and save the result."
    if (folder / "open_clip_config.json").is_file():
        return "this folder holds a model of open_clip. Give the same model as transformers saves it."
    inside = [path.parent for path in sorted(folder.glob("*/config.json"))]
    if (folder / "modules.json").is_file() and inside:
        return f"this folder holds a SentenceTransformer. Give the model in it: {inside[0]}."
    # checkpoint-900 comes before checkpoint-1000
    saved = sorted(folder.glob("checkpoint-*"), key=lambda path: (len(path.name), path.name))
    instead = f"a checkpoint in it, such as {saved[-1]}" if saved else "the folder of a run that has ended"
    return f"this folder holds no model. Give {instead}."


def load_config(what: str, name: str) -> PreTrainedConfig:
    """Load the configuration of a model, a folder or a Hub id; raise as `explained` does.

    Raises:
        ValueError: too if a file of a finished model is not what was written.
    """
    if changed := changed_since_sums(Path(name)):
        raise ValueError(
            f"{what}; its {changed[0]} is missing, or not what was written when the model was finished and {SUMS_FILE} says. Restore it from a copy or, if the change is meant, delete {Path(name) / SUMS_FILE}."
        )
    if Path(name).is_dir() and not Path(name, "config.json").is_file():
        raise ValueError(f"{what}; {_what_it_is(Path(name))}")
    with explained(what, name):
        config: PreTrainedConfig = AutoConfig.from_pretrained(name, trust_remote_code=False)
    if config.model_type.startswith("siglip2"):
        raise ValueError(
            f"{what}; it is a Siglip2 that reads any number of patches (NaFlex), and here images have one size. Choose one of a "
            "size, such as google/siglip2-base-patch16-224."
        )
    if config.model_type == "clap":
        if config.audio_config.fusion_type == "channel_map":
            raise ValueError(
                f"{what}; its fusion_type is channel_map, which reads four spectrograms of a sound, and here it has one. Choose "
                "another model."
            )
        config.audio_config.enable_fusion = False  # the path of sounds that are longer than a window
    attention = str(getattr(config, "_attn_implementation", None) or "")
    if "/" in attention:  # a repository of compiled code
        raise ValueError(
            f"{what}; its config.json asks for the attention of {attention}, and no code of others is run. Take "
            "attn_implementation out of it."
        )
    return config
