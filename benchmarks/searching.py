"""Measure searches of an index, beside plain FAISS and NumPy: recall@10 against exact search, time alone and in a batch, memory.

    python -m benchmarks.searching
    python -m benchmarks.searching --images 1000000 --factories "IVF1024,PQ32 faiss" --folder /tmp/index

Embeddings are drawn: pairs of an image and a text on the unit sphere, with the spectrum and the cosines of a trained model (a
closed form between MobileNetV2 and all-MiniLM-L6-v2 on 1,610 photographs: variance of direction k about (k + 4)^-1.4, mean cosine
of a pair 0.58), without clusters, which real ones have. Queries are texts. Times are those of the processor, on one
thread, with the files in the system's cache: the median, what one query in ten does not exceed, for a machine that is
shared, and a query's share of a batch of all. `faiss` is `IndexFlatIP`, `numpy` a product and `argpartition`, both in fp32.
"""

import json
import logging
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from torch.nn.functional import normalize
from tqdm.auto import tqdm

from benchmarks.harness import machine
from mm_utils.arguments import arg, parse_args
from mm_utils.data.batches.column_cache import to_arrow
from mm_utils.extras.search.first_pass import Find, Hits, StoredVectors, faiss_file, open_find
from mm_utils.extras.search.index import read_rows, replace_rows, schema
from mm_utils.run.start import run_script, set_up_logging
from mm_utils.text import markdown_table

logger = logging.getLogger(__name__)

TOP_K = 10
PEERS = ("faiss", "numpy")
TEXT_NOISE = 1.4  # length of a text's own part beside the part that it shares with its image: cosine 0.58
_ROWS = 1000  # of a table, as scripts/embed.py writes them


@dataclass
class SearchingBenchmarkArguments:
    """What to measure."""

    images: str = arg("100000,1000000", "Sizes of the index.")
    factories: str = arg(
        "IVF1024,PQ32 IVF1024,PQ32;nprobe=256 IVF2048,SQ8 faiss numpy",
        "Values of --index_factory, with spaces between them.",
    )
    width: int = arg(256, "Numbers of an embedding.")
    queries: int = arg(200, "Texts to search for.")
    folder: str | None = arg(None, "Where indexes are written; default: a folder that is removed.")
    output_file: str | None = arg(None, "Also write the figures to this JSON file.")


def draw(count: int, width: int, seed: int, axes_EE: Tensor) -> tuple[Tensor, Tensor]:
    """Draw unit embeddings of images and of their texts, both `[n, E]`."""
    source = torch.Generator().manual_seed(seed)
    deviation_E = (torch.arange(1, width + 1) + 4.0) ** -0.7
    image, own = (torch.randn(count, width, generator=source) * deviation_E for _ in range(2))
    return normalize(image @ axes_EE, dim=1), normalize((image + TEXT_NOISE * own) @ axes_EE, dim=1)


def write_index(folder: Path, images: int, width: int, queries: int) -> Tensor:
    """Write an index of drawn images without thumbnails; return texts, `[queries, E]`."""
    folder.mkdir(parents=True)
    axes_EE = torch.linalg.qr(torch.randn(width, width, generator=torch.Generator().manual_seed(0)))[0]
    texts = []

    def tables() -> Iterator[pa.Table]:
        for start in tqdm(range(0, images, _ROWS), desc=f"Drawing {images:,}"):
            image_NE, text_NE = draw(min(_ROWS, images - start), width, start + 1, axes_EE)
            texts.append(text_NE[: max(0, queries - start)].clone())  # a view would keep them all
            count = len(image_NE)
            known = {"embedding": to_arrow(image_NE.half()), "id": pa.array(map(str, range(start, start + count)))}
            columns = [known.get(each.name, pa.nulls(count, each.type)) for each in schema(width)]
            yield pa.table(columns, schema(width))

    replace_rows(folder, tables(), schema(width))
    return torch.cat(texts)


def peer(kind: str, vectors: StoredVectors) -> Find:
    """Return the search of plain FAISS or NumPy, in fp32."""
    embeds_NE = np.concatenate(vectors.blocks).astype(np.float32)
    if kind == "faiss":
        import faiss

        faiss.omp_set_num_threads(1)
        index: Any = faiss.IndexFlatIP(vectors.width)
        index.add(embeds_NE)
        return lambda query_QE, count: _hits(*index.search(query_QE.numpy(), count))

    def find(query_QE: Tensor, count: int) -> list[Hits]:
        score_QN = query_QE.numpy() @ embeds_NE.T
        rows_Qn = np.argpartition(-score_QN, count)[:, :count]
        return _hits(np.take_along_axis(score_QN, rows_Qn, 1), rows_Qn)

    return find


def _hits(scores_Qn: np.ndarray, rows_Qn: np.ndarray) -> list[Hits]:
    return [
        list(zip(rows.tolist(), scores.tolist(), strict=True)) for rows, scores in zip(rows_Qn, scores_Qn, strict=True)
    ]


def measure(kind: str | None, folder: Path, text_QE: Tensor, expected: list[list[int]]) -> dict[str, Any]:
    """Search once for every text, and for all together; compare with the `expected` rows, if there are any."""
    rows = read_rows(folder, schema(text_QE.shape[1]))
    assert rows is not None
    begin = time.process_time()
    find = peer(kind, StoredVectors(rows)) if kind in PEERS else open_find(kind, folder, rows)
    ready = time.process_time() - begin
    find(text_QE[:1], TOP_K)
    found, seconds = [], []
    for text_1E in text_QE.split(1):
        begin = time.process_time()
        found += [[row for row, _ in hits] for hits in find(text_1E, TOP_K)]
        seconds.append(time.process_time() - begin)
    begin = time.process_time()
    for text_QE_part in text_QE.split(100):
        find(text_QE_part, TOP_K)
    together = (time.process_time() - begin) / len(text_QE)
    same = [len({*one} & {*other}) / TOP_K for one, other in zip(found, expected or found, strict=True)]
    expected[:] = expected or found
    width = text_QE.shape[1]
    numbers: dict[str | None, int] = {None: 2 * width, "faiss": 4 * width}
    size = len(rows) * numbers.get("faiss" if kind in PEERS else kind, 0)
    if not size:
        file = faiss_file(folder, rows, str(kind).partition(";")[0])
        newest = sorted(folder.glob("faiss-*"), key=lambda path: path.stat().st_mtime)
        size = (file if file.exists() else newest[-1]).stat().st_size
    return {
        "images": len(rows),
        "search": kind or "exact",
        f"recall@{TOP_K}": float(np.mean(same)),
        "ms": 1e3 * float(np.median(seconds)),
        "fastest ms": 1e3 * float(np.quantile(seconds, 0.1)),
        "ms in 100": 1e3 * together,
        "MB": size / 1e6,
        "s to make": ready,
    }


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Run the benchmark and return its figures."""
    args = parse_args(SearchingBenchmarkArguments, argv=argv, doc=__doc__)[SearchingBenchmarkArguments]
    set_up_logging()
    torch.set_num_threads(1)
    figures = []
    with tempfile.TemporaryDirectory(dir=args.folder) as base:
        for images in map(int, args.images.split(",")):
            folder = Path(base, str(images))
            text_QE, expected = write_index(folder, images, args.width, args.queries), list[list[int]]()
            for kind in (None, *args.factories.split()):
                figures.append(measure(kind, folder, text_QE, expected))
                logger.info("%s", figures[-1])
    sys.stdout.write(markdown_table(list(figures[0]), [list(each.values()) for each in figures]) + "\n")
    if args.output_file:
        Path(args.output_file).write_text(json.dumps({"machine": machine(), "figures": figures}, indent=2) + "\n")
    return figures


if __name__ == "__main__":
    run_script(main)
