"""A tokenizer of one's own: WordPiece, trained on the captions, the same for the same captions."""

import hashlib
import itertools
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import datasets
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SAMPLE = 1_000_000  # captions that a new tokenizer is trained on
ALPHABET = 1000  # letters of a new tokenizer; a rarer one is unknown
SPECIAL_TOKENS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}


def cached_tokenizer(captions: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Trained once per data set and kept in the datasets cache, so that all processes read the same one."""
    captions = list(itertools.islice(captions, SAMPLE))
    digest = hashlib.blake2b("\n".join([str(vocab_size), *captions]).encode(), digest_size=8).hexdigest()
    folder = Path(datasets.config.HF_DATASETS_CACHE, "tandem_tokenizers", digest)
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=folder.parent))
        train_tokenizer(captions, vocab_size).save_pretrained(temporary)
        try:
            temporary.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(temporary)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def train_tokenizer(captions: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A lower-casing WordPiece tokenizer in BERT's format, for any script; the same captions give the same one."""
    captions, special = list(captions), list(SPECIAL_TOKENS.values())
    alphabet, inner = _alphabet(captions)
    # The trainer numbers inner letters in the random order of a hash map and breaks ties by number; named here, they
    # are numbered in order. They must not stay special tokens, hence the second tokenizer.
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=special + inner,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    trained = _word_piece()
    trained.train_from_iterator(captions, trainer)
    tokenizer = _word_piece(trained.get_vocab())
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")],
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **SPECIAL_TOKENS)


def _word_piece(vocab: dict[str, int] | None = None) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True, strip_accents=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def _alphabet(captions: list[str]) -> tuple[list[str], list[str]]:
    """The most frequent letters, and those among them that occur inside words, as `##x`."""
    tokenizer = _word_piece()
    normalize, words = tokenizer.normalizer.normalize_str, tokenizer.pre_tokenizer.pre_tokenize_str
    counts = Counter(itertools.chain.from_iterable(map(normalize, captions)))
    ranked = sorted((letter for letter in counts if letter != " "), key=lambda letter: (-counts[letter], letter))
    alphabet = sorted(ranked[:ALPHABET])
    return alphabet, [f"##{letter}" for letter in alphabet if len(words(normalize("a" + letter))) == 1]
