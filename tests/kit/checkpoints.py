"""Small checkpoints, and what breaks them."""

from pathlib import Path

from mm_utils.checkpointing.files import STATE_FILE, write_checkpoint

FILES = {STATE_FILE: b'{"global_step": 1}', "model.safetensors": b"weights" * 9, "deep/er/tokens.txt": b"a\nb\n"}


def write_files(folder: Path) -> None:
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def saved(output_dir: Path, *steps: int) -> Path:
    for step in steps:
        write_checkpoint(output_dir / f"checkpoint-{step}", write_files)
    return output_dir / f"checkpoint-{steps[-1]}"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
