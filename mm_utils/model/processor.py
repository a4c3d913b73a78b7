"""Load or make what turns captions and media into inputs of a model.

The same captions make the same tokenizer. A feature extractor carries `window_seconds`, how much of a sound the model reads at once.
It is the whole input of the tower, where this is fixed, so that its time axis is that of the window.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import BertWordPieceTokenizer
from transformers import (
    AddedToken,
    ASTFeatureExtractor,
    AutoConfig,
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoTokenizer,
    AutoVideoProcessor,
    BaseVideoProcessor,
    ClapFeatureExtractor,
    ClapProcessor,
    CLIPImageProcessor,
    GemmaTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    SequenceFeatureExtractor,
    Siglip2Tokenizer,
    VisionTextDualEncoderProcessor,
)

from mm_utils.model.arguments import ModelArguments, check_reads, vision_preset
from mm_utils.model.pretrained import check_words, complete, explained, load_config
from mm_utils.model.reading import CLIP_FRAMES, MOST_SECONDS
from mm_utils.stored import key_of, stored, version_of
from mm_utils.text import one_line

MOST_CAPTIONS = 1_000_000  # that a vocabulary knows of
SAMPLE = 250_000  # of these, evenly spread, that it is learnt from: 10 s of CPU
_TOKENIZER_VERSION = 1  # part of its key in the cache; raise it with every change of what is learnt
ALPHABET = 1000  # letters of the vocabulary; rarer ones are unknown
SPECIAL_TOKENS = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
SOUND_RATE = 16000  # samples a second, of a spectrogram for a tower from scratch
HOP = 400  # samples from frame to frame of it
_COLOURS = ((0, 0, 0), (255, 255, 255), (200, 100, 50))


def load_processor(
    args: ModelArguments,
    captions: Iterable[str],
    medium: str = "image",
    seconds: float | None = None,
    frames: int | None = None,
) -> ProcessorMixin:
    """Load tokenizer and image processor, or, for sounds, feature extractor.

    A text backbone from scratch gets a tokenizer trained on `captions`. The image processor does exactly what
    `mm_utils.model.reading.center_square` does, and normalises colours as the backbone's own processor does;
    clips are read as their frames.

    Args:
        seconds, frames: how much of a sound or a clip is read, unless the tower has its own; default: 10 s, 16 frames.

    Raises:
        ValueError: if a part is missing or damaged, or is of other media.
    """
    if name := args.model_name_or_path:
        whole = load_processor_of(name, args.image_size)
        check_reads(name, ("sound",) if hasattr(whole, "feature_extractor") else ("image", "clip"), medium)
        if args.joins_whole:
            whole.tokenizer = _tokenizer(args, captions)
    elif medium == "sound":
        whole = ClapProcessor(_feature_extractor(args, seconds), _tokenizer(args, captions))
    else:
        whole = VisionTextDualEncoderProcessor(_image_processor(args, medium), _tokenizer(args, captions))
    if medium == "clip":
        images: Any = whole.image_processor
        images.clip_frames = getattr(images, "clip_frames", None) or _own_frames(args) or frames or CLIP_FRAMES
    # Not special ones: these are taken for text where a caption has them. A word that the tokenizer has stays as it is.
    whole.tokenizer.add_tokens([AddedToken(word, normalized=False) for word in args.new_tokens])
    return whole


def _own_frames(args: ModelArguments) -> int | None:
    """Return how many frames a video backbone reads; None for others, which read any number."""
    name = args.model_name_or_path or args.vision_model_name_or_path
    if name:
        config = load_config(f"the model is {name}", name)
        config = getattr(config, "vision_config", config)
    else:
        config = AutoConfig.for_model(**vision_preset(args, "clip"))
    return getattr(config, "num_frames", None) or getattr(config, "frames_per_clip", None)


def load_processor_of(name: str, image_size: int | None = None) -> ProcessorMixin:
    """Load the processor of a saved model; images become squares as in `load_processor`, by default of its own size."""
    what = f"the model is {name}"
    of_sounds = False
    with explained(f"the processor of {name} is missing or damaged", name):
        with suppress(OSError):  # of sounds or of images
            of_sounds = "sampling_rate" in SequenceFeatureExtractor.get_feature_extractor_dict(name)[0]
        kind: Any = ClapProcessor if of_sounds else VisionTextDualEncoderProcessor
        processor = kind.from_pretrained(name, trust_remote_code=False)
        complete(processor.tokenizer)
    config = load_config(what, name)
    if config.model_type == "siglip" and isinstance(processor.tokenizer, GemmaTokenizer):
        # SigLIP 2 was trained on lower-case texts, and the tokenizer in its folders leaves them as they are
        processor.tokenizer = complete(Siglip2Tokenizer.from_pretrained(name))
    words = getattr(getattr(config, "text_config", None), "vocab_size", None)
    if words is not None:
        check_words(what, processor.tokenizer, words)
    if kind is ClapProcessor:
        _set_window(processor.feature_extractor, None)
        return processor
    own = processor.image_processor
    squares: Any = _center_square_processor(own, image_size, what)
    if frames := getattr(own, "clip_frames", None) or _own_frames(ModelArguments(name)):
        squares.clip_frames = frames
    processor.image_processor = squares
    return processor


def _image_processor(args: ModelArguments, medium: str = "image") -> CLIPImageProcessor:
    if name := args.vision_model_name_or_path:
        what = f"--vision_model_name_or_path is {name}"
        with explained(what, name):
            try:
                own = AutoImageProcessor.from_pretrained(name, trust_remote_code=False)
            except (OSError, ValueError):
                if medium != "clip":
                    raise
                # The only one that some video backbones have
                own = AutoVideoProcessor.from_pretrained(name, trust_remote_code=False)
        return _center_square_processor(own, args.image_size, what)
    size = args.image_size or vision_preset(args, medium).get("image_size")
    return _center_square_processor(CLIPImageProcessor(image_mean=[0.5] * 3, image_std=[0.5] * 3), size)


def _center_square_processor(
    own: Any, size: int | None = None, what: str = "the image processor"
) -> CLIPImageProcessor:
    """Return a processor of central squares, by default of the size of `own`, with the values that it uses for every colour.

    Raises:
        ValueError: if no mean and standard deviation express what `own` does, or its images are not squares.
    """
    size = size or _own_side(own, what)
    mean, std = _normalisation(own, what)
    return CLIPImageProcessor(
        size={"shortest_edge": size}, crop_size={"height": size, "width": size}, image_mean=mean, image_std=std
    )


def _own_side(own: Any, what: str) -> int:
    if hasattr(own, "data_config"):  # timm
        return own.data_config["input_size"][-1]
    crop = getattr(own, "crop_size", None) if getattr(own, "do_center_crop", None) else None
    size = {name: side for name, side in dict(crop or own.size or {}).items() if side}
    side = size.get("height") or size.get("shortest_edge") or size.get("longest_edge") or 224
    if size.get("width", side) != side:
        raise ValueError(
            f"{what}; its {type(own).__name__} makes images of {side} x {size['width']} pixels, and here images are squares. "
            "Give --image_size, or choose another backbone."
        )
    return side


def _normalisation(own: Any, what: str) -> tuple[list[float], list[float]]:
    """Return mean and std of each colour with the values of `own`: (c / 255 - mean) / std.

    They are measured: classes rescale or not, by 1/255 or to [-1, 1], normalise or not, or twice, or reorder the colours.
    """
    values = np.array([_value_of(own, colour, what) for colour in _COLOURS])
    scale = values[1] - values[0]  # from black to white
    scale[scale == 0] = 1
    # black is -mean / std, white less black 1 / std
    measured = ((0 - values[0] / scale).tolist(), (1 / scale).tolist())
    given = (getattr(own, "image_mean", None) or [0.5] * 3, getattr(own, "image_std", None) or [0.5] * 3)
    for mean, std in (given, measured):  # the given ones have no rounding
        with np.errstate(all="ignore"):
            expected = (np.array(_COLOURS) / 255 - mean) / std
        if np.isfinite(expected).all() and np.allclose(expected, values, atol=1e-3):
            return list(mean), list(std)
    raise ValueError(
        f"{what}; its {type(own).__name__}, with a mean of {given[0]} and a standard deviation of {given[1]}, does not make "
        "RGB images that these normalise. Choose another backbone."
    )


def _value_of(own: Any, colour: tuple[int, int, int], what: str) -> list[float]:
    """Return the three values in the middle of an image of one colour."""
    try:
        image = Image.new("RGB", (64, 64), colour)
        given = {"videos": [[image] * 2]} if isinstance(own, BaseVideoProcessor) else {"images": image}
        found = own(**given, return_tensors="pt")
        pixels = np.asarray(found.get("pixel_values", found.get("pixel_values_videos", [])))
        pixels = pixels[:, 0] if pixels.ndim == 5 else pixels  # the first frame
        if pixels.ndim != 4 or pixels.shape[1] != 3:
            raise ValueError("it returns no image of three colours, but parts or patches")
    except Exception as error:  # of any kind: these classes ask for other inputs, packages or settings
        raise ValueError(
            f"{what}; its {type(own).__name__} cannot read one image alone: {one_line(error)}. Choose another backbone."
        ) from error
    return [float(value) for value in pixels[0, :, pixels.shape[2] // 2, pixels.shape[3] // 2]]


# -- sounds -------------------------------------------------------------------------------------------------------------


def _feature_extractor(args: ModelArguments, seconds: float | None) -> SequenceFeatureExtractor:
    """Load the feature extractor of a pretrained sound tower, or make one."""
    name = args.vision_model_name_or_path
    if name:
        with explained(f"--vision_model_name_or_path is {name}", name):
            found = AutoFeatureExtractor.from_pretrained(name, trust_remote_code=False)
    else:
        size = vision_preset(args, "sound").get("image_size")
        if not isinstance(size, list):
            raise ValueError(
                f"--vision_config is {args.vision_config}, whose image_size is {size}; these are sounds. Give tiny, or a config of "
                "a tower of images whose image_size is [frames, bands]."
            )
        found = ClapFeatureExtractor(
            feature_size=size[1], sampling_rate=SOUND_RATE, hop_length=HOP, max_length_s=math.ceil(seconds or MOST_SECONDS),
            fft_window_size=1024, frequency_min=30, frequency_max=SOUND_RATE // 2, truncation="rand_trunc", padding="pad",
        )  # fmt: skip
    _set_window(found, seconds)
    return found


def _set_window(extractor: Any, seconds: float | None) -> None:
    """Write `window_seconds` into a feature extractor: what it always makes, or else `seconds`."""
    is_ast = isinstance(extractor, ASTFeatureExtractor)
    if is_ast and not hasattr(extractor, "window_seconds"):
        extractor.pads_frames = True
    own: Any = extractor.max_length / 100 if is_ast else None  # AST: 1,024 frames of 10 ms
    own = own or getattr(extractor, "max_length_s", None) or getattr(extractor, "chunk_length", None)
    kept = getattr(extractor, "window_seconds", MOST_SECONDS)
    extractor.window_seconds = float(own or seconds or kept)


def _tokenizer(args: ModelArguments, captions: Iterable[str]) -> PreTrainedTokenizerBase:
    source = args.text_model_name_or_path
    if not source:
        return complete(cached_tokenizer(captions, args.vocab_size))
    with explained(f"--text_model_name_or_path is {source}", source):
        return complete(AutoTokenizer.from_pretrained(source, trust_remote_code=False))


# -- WordPiece ----------------------------------------------------------------------------------------------------------


def cached_tokenizer(captions: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer once per captions and size, and keep it in the datasets cache."""
    captions = list(itertools.islice(captions, MOST_CAPTIONS))
    if len(captions) > SAMPLE:
        captions = captions[:: -(-len(captions) // SAMPLE)]  # of 600,000 captions every third
    key = key_of(_TOKENIZER_VERSION, version_of("tokenizers"), vocab_size, captions)
    folder = stored("tokenizers", key, lambda work: train_tokenizer(captions, vocab_size).save_pretrained(work))
    return PreTrainedTokenizerFast.from_pretrained(folder)


def train_tokenizer(captions: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a lower-casing WordPiece tokenizer in BERT's format, for any script."""
    captions = list(captions)
    special = list(SPECIAL_TOKENS.values())
    trained = BertWordPieceTokenizer(strip_accents=False)
    alphabet, inner = _alphabet(trained, captions)
    # The trainer numbers inner letters in the random order of a hash map and breaks ties by number; named here, they
    # are numbered in order. They must not stay special tokens, hence the second tokenizer.
    trained.train_from_iterator(
        captions,
        vocab_size=vocab_size,
        min_frequency=0,
        special_tokens=special + inner,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    made: Any = BertWordPieceTokenizer(trained.get_vocab(), strip_accents=False)
    return PreTrainedTokenizerFast(tokenizer_object=made._tokenizer, model_max_length=512, **SPECIAL_TOKENS)


def _alphabet(tokenizer: Any, captions: list[str]) -> tuple[list[str], list[str]]:
    """Return the most frequent letters, and those of them that occur inside words, as `##x`."""
    normalize = tokenizer.normalizer.normalize_str
    words = tokenizer.pre_tokenizer.pre_tokenize_str
    counts = Counter(itertools.chain.from_iterable(map(normalize, captions)))
    ranked = sorted((letter for letter in counts if letter != " "), key=lambda letter: (-counts[letter], letter))
    alphabet = sorted(ranked[:ALPHABET])
    return alphabet, [f"##{letter}" for letter in alphabet if len(words(normalize("a" + letter))) == 1]
