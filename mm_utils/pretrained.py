"""Load what others have trained: weights as safetensors alone, and no code that comes with them unless it is asked for.

A pickle (`pytorch_model.bin`) can run any code when it is read, and so can the Python files of a model repository.
`transformers` asks on the terminal whether to run these where nothing is said; here nothing is asked.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_LONGEST = 300  # characters of what a library says


class OwnCodeError(ValueError):
    """A model that needs Python code of its own, which is not run."""


@contextmanager
def explained(what: str, name: str) -> Iterator[None]:
    """Make of whatever `from_pretrained` of `name` raises a ValueError that `what` opens and that says what to do.

    Raises:
        OwnCodeError: if it needs code of its own.
        ValueError: if it has no weights but pickles, or cannot be read.
    """
    try:
        yield
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        text = " ".join(str(error).split())
        if "trust_remote_code" in text:
            raise OwnCodeError(
                f"{what}; it needs Python code of its own, and no code of others is run unasked. Read that code, then "
                "give --trust_remote_code, or choose another model."
            ) from error
        pickles = _pickles(name)
        if "safetensors" in text and (pickles or not Path(name).is_dir()):
            raise ValueError(
                f"{what}; it has no model.safetensors{f', but {pickles[0]}' if pickles else ''}, and pickles, which can "
                "run any code, are not read. Convert it where nothing can be lost: "
                "AutoModel.from_pretrained(...).save_pretrained(...)."
            ) from error
        raise ValueError(f"{what}; it cannot be loaded: {text[:_LONGEST]}") from error


def load_config(what: str, name: str, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The configuration of a model: a folder or a Hub id. Raises as `explained` does."""
    with explained(what, name):
        config: PreTrainedConfig = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    attention = str(getattr(config, "_attn_implementation", None) or "")
    if "/" in attention and not trust_remote_code:  # a repository of compiled code
        raise OwnCodeError(
            f"{what}; its config.json asks for the attention of {attention}, and no code of others is run unasked. Take "
            "attn_implementation out of it, or give --trust_remote_code."
        )
    return config


def load_backbone(
    what: str, name: str, config: PreTrainedConfig, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A model by `AutoModel`, in float32, and what its loading found. Raises as `explained` does."""
    with explained(what, name):
        return AutoModel.from_pretrained(
            name,
            config=config,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            dtype="float32",
            output_loading_info=True,
        )


def _pickles(name: str) -> list[str]:
    """Names of the files of a folder that look like pickled weights."""
    folder = Path(name)
    return [path.name for pattern in _PICKLES for path in sorted(folder.glob(pattern))] if folder.is_dir() else []
