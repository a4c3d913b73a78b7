"""Search the images, clips or sounds of an index that scripts/embed.py made: by text, by a file, or on a local page.

A ranked table of the best hits:
    python scripts/search.py --index_dir outputs/index "a red door"
    python scripts/search.py --index_dir outputs/index --image query.jpg --top_k 5

Of one folder or of some days alone; and what the folder holds more than once:
    python scripts/search.py --index_dir outputs/index "a red door" --folder 2024/italy --since 2024-05 --until 2024-06-15
    python scripts/search.py --index_dir outputs/index --copies

A page and a JSON API on this machine:
    python scripts/search.py --index_dir outputs/index --serve
"""

import json
import logging
import os
import sys
from dataclasses import dataclass
from typing import Any

from mm_utils.arguments import arg, parse_args, parse_first, required


@dataclass
class SearchArguments:
    """The index, the query, and the form of the answer."""

    index_dir: str = required("The folder that scripts/embed.py wrote.")
    query: str | None = arg(
        None,
        "The text to search for, such as dog -cat for dogs without cats; it may also stand alone, without this flag.",
    )
    image: str | None = arg(
        None, "Search for what is similar to this file: an image or, in an index of sounds, a sound."
    )
    copies: bool = arg(False, "List the images that occur more than once, also compressed, scaled or brightened.")
    folder: str = arg("", "Search only below this folder of those that were embedded, such as 2024/italy.")
    since: str = arg(
        "", "Search only photographs taken on or after this day (2024-05-31), month or year, by their EXIF."
    )
    until: str = arg("", "Search only photographs taken on or before this day, month or year.")
    top_k: int = arg(10, "Hits to show.", least=1)
    rerank_top_k: int = arg(
        10, "Let the fusion head reorder the first K hits of a text, where training found that it helps; 0 = do not."
    )
    read_captions: bool = arg(True, "For a text, also count the embeddings of the captions that the index has.")
    model_name_or_path: str | None = arg(None, "Where the model is, if it has moved since the index was made.")
    json: bool = arg(False, "Print one JSON object per hit.")
    serve: bool = arg(False, "Serve a page and a JSON API instead.")
    port: int = arg(8000, "The port of this machine to serve on.", most=65535)

    def __post_init__(self) -> None:
        self.query = (self.query or "").strip() or None  # a blank text asks for nothing


if __name__ == "__main__":
    parse_first(SearchArguments, doc=__doc__, rest="query")

from mm_utils.model.reading import UnreadableError
from mm_utils.places import missing
from mm_utils.run.script import run_script, set_up_logging, use_cpu_well
from mm_utils.search.searcher import Hit, Searcher
from mm_utils.search.server import serve
from mm_utils.text import printable, shortened

logger = logging.getLogger(__name__)


def answer(searcher: Searcher, args: SearchArguments) -> Any:
    """Return the hits of the query, or groups of copies."""
    if args.copies:
        return searcher.copies()
    if args.image:
        try:
            own, hits = searcher.look_up(args.image, args.top_k)
        except UnreadableError as error:
            what = {"image": "an image", "sound": "a sound"}.get(searcher.info.medium, f"a {searcher.info.medium}")
            raise ValueError(
                f"--image is {args.image}; it cannot be read as {what}: {error}. Give another file."
            ) from error
        for hit in own:
            logger.info("%s is in the index as %s", args.image, hit.id)
        return hits
    return searcher.search_text(args.query or "", args.top_k)


def table_of_hits(hits: list[Hit], searcher: Searcher) -> list[str]:
    """Return a head, a line for each hit, and one that says where none may fit."""
    reranks = searcher.reranks
    lines = [f"rank   score{'  re-ranked' if reranks else ''}  {searcher.info.medium}"]
    for hit in hits:
        again = "" if hit.reranked is None else f"{hit.reranked:.3f}"
        again = f"{again:>11}" if reranks else ""
        words = f"  ({shortened(hit.captions[0], 60)})" if hit.captions else ""
        words += f"  +{len(hit.copies)} near copies" if hit.copies else ""
        where = "  ".join(filter(None, [hit.id, hit.split, hit.path])) if hit.split else hit.path
        lines.append(printable(f"{hit.rank:>4}{hit.score:>8.3f}{again}  {where}{words}"))
    if hits and all(hit.fits is False for hit in hits):
        lines.append(f"Perhaps nothing fits: 1 of 100 texts of random letters reaches {searcher.info.level:.3f}, too.")
    return lines


def table_of_copies(groups: list[list[dict[str, Any]]]) -> list[str]:
    """Return a line for each image, groups apart, and how many there are."""
    lines = []
    for group in groups:
        lines += [printable(each["path"] or each["id"]) for each in group]
        lines.append("")
    return (
        [*lines, f"Pictures that occur more than once: {len(groups):,}, in {sum(map(len, groups)):,} files"]
        if groups
        else ["No picture occurs twice; a copy that was cropped or shifted may be missed"]
    )


def main(argv: list[str] | None = None) -> None:
    """Run the script; `argv` lets tests and notebooks call it."""
    # 1. Arguments.
    parsed = parse_args(SearchArguments, argv=argv, doc=__doc__, rest="query")
    args = parsed[SearchArguments]
    set_up_logging()
    given = [name for name in ("query", "image", "serve", "copies") if getattr(args, name)]
    if len(given) != 1:
        raise ValueError(
            f"There are {len(given)} of a text, --image, --copies and --serve; give one, e.g. --index_dir {args.index_dir} "
            '"a red door".'
        )
    is_folder = os.path.isdir(args.image or "")
    if problem := missing(args.image or "", is_local=True) or ("that is a folder. Give a file." if is_folder else ""):
        raise ValueError(f"--image is {args.image}; {problem}")

    if args.serve:
        parsed.refuse("top_k json folder since until", "the page and its API have their own")
    else:
        parsed.refuse("port", "--serve is not given")
    if args.copies:
        parsed.refuse("top_k rerank_top_k read_captions", "--copies compares the thumbnails of all images")

    # 2. The index and its model.
    use_cpu_well()
    searcher = Searcher(
        str(args.index_dir), args.model_name_or_path, args.rerank_top_k, read_captions=args.read_captions
    )

    # 3. Serve, or answer one query.
    if args.serve:
        serve(searcher, args.port)
        return
    searcher = searcher.within(args.folder, args.since, args.until)
    medium = searcher.info.medium
    if searcher.undated:
        logger.info("%s %ss have no day and are left out", f"{searcher.undated:,}", medium)
    if not searcher.searched:
        raise ValueError(f"--folder, --since and --until let no {medium} of {args.index_dir} through. Widen them.")
    found = answer(searcher, args)

    # 4. Print.
    if args.json:
        lines = [json.dumps(each if args.copies else vars(each)) for each in found]
    else:
        lines = table_of_copies(found) if args.copies else table_of_hits(found, searcher)
    sys.stdout.write("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    # letters that a terminal cannot show are escaped, and do not end the search
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    run_script(main, "The index is as it was.")
