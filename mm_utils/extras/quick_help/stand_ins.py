"""Answer a script's `--help`, and a path that leads nowhere, without loading torch and the other large libraries.

Each script imports this first.

Where the first word of a script's command line asks for help, what it imports of those libraries is a stand-in that can be
subclassed, called and used in annotations, which is all that importing our modules does with them. The flags and their text
come from the same dataclasses and the same parser as ever. A script that was changed to compute with a library while it is
imported is started once more without stand-ins.
"""

import logging
import runpy
import sys
from abc import ABCMeta
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

from mm_utils.command import scripts_folder
from mm_utils.places import check_words

LIBRARIES = (
    "accelerate aiohttp datasets evaluate fsspec huggingface_hub langcodes matplotlib peft PIL psutil pyarrow safetensors scipy "
    "tokenizers torch torchvision transformers"
)
_PARSER = "transformers.hf_argparser"  # loaded without the package around it


class _Names(ABCMeta):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandIn()


class _Base(metaclass=_Names):
    """What a class of ours has as base in place of a library's."""


class _StandIn:
    """A module of a library or anything in it."""

    __file__ = __version__ = ""
    __mro__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = self.__dict__[name] = _StandIn()
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _StandIn()

    def __mro_entries__(self, bases: Sequence[Any]) -> tuple[type, ...]:
        return (_Base,) if next(each for each in bases if isinstance(each, _StandIn)) is self else ()

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    __getitem__ = __or__ = __ror__ = __call__


class _Libraries(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        library = name.partition(".")[0]
        if library not in LIBRARIES.split():
            return None
        if name == _PARSER and (package := PathFinder.find_spec(library)) is not None and package.origin:
            return spec_from_file_location(name, Path(package.origin).with_name("hf_argparser.py"))
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> Any:
        return _StandIn()

    def exec_module(self, module: Any) -> None:
        pass


def _asks_for_help(words: Sequence[str]) -> bool:
    return bool(words) and words[0].partition("=")[0] in ("-h", "--help", "--help-all")


def _answer() -> None:
    """Call the script's `main`, which prints the help and ends the process; return where stand-ins do not do."""
    libraries, before = _Libraries(), set(sys.modules)
    sys.meta_path.insert(0, libraries)
    try:
        runpy.run_path(sys.argv[0], run_name="script")["main"]()
    except Exception as error:  # of a changed script: the libraries are loaded for it, and any mistake shows again
        logging.getLogger(__name__).debug("--help needs the libraries: %r", error)
    sys.meta_path.remove(libraries)
    for name in sys.modules.keys() - before:
        del sys.modules[name]


if Path(sys.argv[0]).resolve().parent == scripts_folder():
    if _asks_for_help(sys.argv[1:]):
        _answer()
    check_words(Path(sys.argv[0]).name, sys.argv[1:])
