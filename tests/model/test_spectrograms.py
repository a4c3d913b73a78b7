"""Inputs of sound towers equal those of the stock feature extractors."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    ASTFeatureExtractor,
    ClapFeatureExtractor,
    SeamlessM4TFeatureExtractor,
    Wav2Vec2FeatureExtractor,
    WhisperFeatureExtractor,
)

from mm_utils.model.spectrograms import LogMel

CLAP: dict[str, Any] = {"truncation": "rand_trunc", "sampling_rate": 16000, "max_length_s": 1, "frequency_max": 8000}
EXTRACTORS = {
    "ast": ASTFeatureExtractor(max_length=100),
    "ast of other sizes": ASTFeatureExtractor(max_length=61, num_mel_bins=40, mean=-6.5, std=3.1),
    "ast, not normalised": ASTFeatureExtractor(max_length=30, do_normalize=False),
    "whisper": WhisperFeatureExtractor(chunk_length=1),
    "clap": ClapFeatureExtractor(**CLAP, padding="pad"),
    "clap in loops": ClapFeatureExtractor(**CLAP, padding="repeatpad"),
    "clap in cut loops": ClapFeatureExtractor(**CLAP, padding="repeat"),
    "clap of other sizes": ClapFeatureExtractor(
        32, 22050, 441, 1, 800, frequency_min=50, truncation="rand_trunc", padding="pad"
    ),
    "clap, fused": ClapFeatureExtractor(**{**CLAP, "truncation": "fusion"}, padding="repeatpad"),
    "raw": Wav2Vec2FeatureExtractor(),
    "raw, not normalised": Wav2Vec2FeatureExtractor(do_normalize=False),
}


def sounds(samples: int) -> np.ndarray:
    """Noise, a loud tone as 16 bits keep it, a click in silence, and silence; float32 `[4, samples]`."""
    time = np.arange(samples) / 16000
    noise = 0.1 * np.random.default_rng(0).standard_normal(samples)
    tone = np.round(0.9 * np.sin(2 * np.pi * 440 * time) * 32767) / 32768
    click = np.where(np.arange(samples) == samples // 3, 1.0, 0.0)
    return np.stack([noise, tone, click, 0 * time]).astype(np.float32)


def stock(extractor: Any, waveforms: np.ndarray) -> np.ndarray:
    found = [extractor(each, sampling_rate=extractor.sampling_rate, return_tensors="np") for each in waveforms]
    features = np.concatenate([next(iter(each.values())) for each in found])
    return features[:, :1] if features.ndim == 4 else features  # a fused CLAP's has four copies


@pytest.mark.parametrize("name", EXTRACTORS)
def test_equals_the_stock_extractor(name: str) -> None:
    extractor = EXTRACTORS[name]
    log_mel = LogMel.of(extractor)
    for samples in (5000, log_mel.samples or 16000, 40000):
        waveforms = sounds(samples)
        if isinstance(extractor, ClapFeatureExtractor):  # stock CLAP cuts at random
            waveforms = waveforms[:, : log_mel.samples]
        found, expected = log_mel(torch.from_numpy(waveforms)), stock(extractor, waveforms)
        assert found.dtype == torch.float32
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", ["ast", "whisper", "clap in loops", "raw"])
def test_autocast_and_batches_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    log_mel, waveforms = LogMel.of(EXTRACTORS[name]), torch.from_numpy(sounds(12000))
    expected = log_mel(waveforms)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(log_mel(waveforms), expected)
    monkeypatch.setattr("mm_utils.model.spectrograms._MAX_SAMPLES", 1)
    assert torch.allclose(log_mel(waveforms), expected, atol=1e-6)
    assert torch.equal(pickle.loads(pickle.dumps(log_mel))(waveforms), log_mel(waveforms))


def test_description_tells_extractors_apart() -> None:
    described = [LogMel.of(extractor).describe() for extractor in EXTRACTORS.values()]
    assert all(described[a] != described[b] for a in range(len(described)) for b in range(a))


@pytest.mark.parametrize(
    ("extractor", "reason"),
    [
        (SeamlessM4TFeatureExtractor(), "is a SeamlessM4TFeatureExtractor; known are .*AST"),
        (ClapFeatureExtractor(truncation="middle"), 'truncation "middle"'),
        (ClapFeatureExtractor(truncation="rand_trunc", padding="loop"), 'padding "loop"'),
        (WhisperFeatureExtractor(dither=0.1), "dither of 0.1"),
    ],
)
def test_unknown_extractors(extractor: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        LogMel.of(extractor)
