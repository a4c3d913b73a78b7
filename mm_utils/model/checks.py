"""Check what is given as a model before anything is loaded."""

import shlex
from pathlib import Path

from mm_utils.model.modeling_fusion_dual_encoder import (
    DUAL_ENCODERS,
    FusionDualEncoderConfig,
    FusionDualEncoderModel,
    text_positions,
)
from mm_utils.model.open_clip import opened
from mm_utils.model.pretrained import load_config
from mm_utils.places import missing


def check_model(name: str | None, flag: str = "--model_name_or_path") -> None:
    """Check that a flag's value is a whole model, in a folder or on the Hub; None is right.

    Raises:
        ValueError: if it is not, with what to give instead.
    """
    if name is None:
        return
    title, name = f"{flag} is {name}", opened(name)
    path = Path(name)
    if not path.is_dir():
        # The Hub id of a whole model has one slash.
        problem = missing(name if "/" in name else f"./{name}").removesuffix(" Check the path.")
        if problem or path.exists():
            problem = problem or "there is no such folder."
            raise ValueError(f"{title}; {problem} Give the folder of a run, or a Hub id such as owner/name.")
    elif not (path / "config.json").is_file():
        saved = sorted(path.glob("checkpoint-*"), key=lambda folder: (len(folder.name), folder.name))
        raise ValueError(
            f"{title}; this folder holds no model. "
            + (
                f"Give a checkpoint in it, such as {saved[-1]}."
                if saved
                else "Give the folder of a run that has ended."
            )
        )
    config = load_config(title, name)
    if config.model_type in (FusionDualEncoderConfig.model_type, *DUAL_ENCODERS):
        return
    towers = [tower for tower, sign in (("vision", "num_channels"), ("text", "vocab_size")) if hasattr(config, sign)]
    towers = ["vision", "text"] if hasattr(config, "vision_config") else towers or ["vision", "text"]
    flags = " and ".join(f"--{tower}_model_name_or_path {shlex.quote(name)}" for tower in towers)
    raise ValueError(
        f"{title}; that is a {config.model_type}, and a whole model has both encoders of scripts/pretrain.py. To train one "
        f"from it, give scripts/pretrain.py {flags}."
    )


def has_no_head(name: str) -> bool:
    """Return whether a whole model is an earlier run's that was trained without a fusion head."""
    return getattr(load_config(f"--model_name_or_path is {name}", opened(name)), "fusion_layers", None) == 0


def check_positions(model: FusionDualEncoderModel, max_seq_length: int) -> None:
    """Raise ValueError if the text tower cannot read captions of so many tokens."""
    most = text_positions(model.text_model)
    if most is not None and max_seq_length > most:
        raise ValueError(
            f"--max_seq_length is {max_seq_length}; the text backbone has positions for {most} tokens. Give at most {most}."
        )
