"""What the benchmark of remote shards writes is read whole, from the disk and, where moto is installed, from a server."""

from pathlib import Path

import pytest

from benchmarks.data import remote


@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_all_rows_that_were_written_are_read(kind: str, tmp_path: Path) -> None:
    image = remote.image_of(3)
    assert 1000 < len(image) < 6000
    remote.write(tmp_path, 30, image)
    assert remote.read(f"{tmp_path}/*.{kind}")[2] == 30


def test_a_server_has_the_rows_of_the_disk(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    figures = remote.main(["--rows", "40", "--rounds", "1"])
    assert [(row["shards"], row["from"]) for row in figures] == [
        (kind, name) for kind in ("tar", "parquet") for name in ("disk", "S3")
    ]
    assert "rows a CPU second" in capsys.readouterr().out
