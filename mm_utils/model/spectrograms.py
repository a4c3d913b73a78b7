"""The input of a sound tower, as its own feature extractor computes it, in batches; saved with every model, beside its code.

Sizes, filters, window, mean and standard deviation are those of the extractor. The sums are done in float64 where the
device has it: in float32, rounding of a loud tone covers what is 100 dB below it, and two devices would not agree.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import ASTFeatureExtractor, ClapFeatureExtractor, WhisperFeatureExtractor
from transformers.audio_utils import mel_filter_bank
from transformers.models.wav2vec2 import Wav2Vec2FeatureExtractor

_MAX_SAMPLES = 2**22  # of one pass; its spectra take up to about 0.3 GB


class LogMel(ABC):
    """Turns waveforms float `[B, samples]` into the tower's float32 input; `of` makes one.

    Attributes:
        rate: samples a second.
        samples: what the input covers. Shorter waveforms are padded to it and longer ones cut, as the extractor does;
            where it would cut at random, here the beginning stays. 0: an input of any length.
    """

    read: ClassVar[tuple[str, ...]] = ()  # the attributes of the extractor that decide what is computed
    after_end: int = 0  # the 16-bit sample that follows a short sound in its window

    def __init__(self, extractor: Any) -> None:
        self.rate: int = extractor.sampling_rate
        self.samples = 0
        self.description = {"extractor": type(extractor).__name__}
        self.description |= {name: getattr(extractor, name) for name in ("sampling_rate", *self.read)}
        self.constants: tuple[Tensor, ...] = ()  # window, and filters `[frequencies, mel]`

    @staticmethod
    def of(feature_extractor: Any) -> "LogMel":
        """Return what computes the same as a feature extractor of transformers; ValueError if that or its settings are not known."""
        name = type(feature_extractor).__name__
        if name not in SOUND_INPUTS:
            raise ValueError(f"the feature extractor is a {name}; known are {', '.join(SOUND_INPUTS)}.")
        return SOUND_INPUTS[name](feature_extractor)

    @torch.no_grad()
    def __call__(self, waveforms: Tensor) -> Tensor:
        """Return the tower's input, float32: AST `[B, frames, mel]`, CLAP `[B, 1, frames, mel]`, Whisper `[B, mel, frames]`, raw."""
        precision = torch.float32 if waveforms.device.type == "mps" else torch.float64
        self.constants = tuple(each.to(waveforms.device, precision) for each in self.constants)
        parts = waveforms.split(max(1, _MAX_SAMPLES // (self.samples or waveforms.shape[1])))
        with torch.autocast(waveforms.device.type, enabled=False):
            return torch.cat([self._features(part.to(precision)).float() for part in parts])

    def describe(self) -> dict[str, Any]:
        """Return what decides the numbers, equal on every machine: for keys and identities."""
        return dict(self.description)

    def window(
        self, part: np.ndarray, size: int, silent: int = 0, change: Callable[[np.ndarray], np.ndarray] | None = None
    ) -> np.ndarray:
        """Return the int16 samples of a window, `[size]`: of a sound, `[n]`, that begins after `silent` ones of silence.

        It comes again, or silence or empty frames follow it, as the extractor does. `change` is applied to all before that.
        """
        part = np.tile(part, self.loops(len(part)))
        shown = np.zeros(size, np.int16)
        shown[silent : silent + len(part)] = part[: size - silent]
        shown = shown if change is None else change(shown)
        if self.after_end:
            shown = shown.clip(self.after_end + 1)
            shown[silent + len(part) :] = self.after_end
        return shown

    def loops(self, samples: int) -> int:
        """Return how many times the extractor repeats a sound of `samples` to fill the window."""
        return 1

    @abstractmethod
    def _features(self, waveforms: Tensor) -> Tensor: ...

    def mel(self, frames: Tensor, fft: int) -> Tensor:
        """Return the energy in every mel band, `[B, frames, mel]`, of windows `[B, frames, size]`."""
        window, filters = self.constants
        spectrum = torch.fft.rfft(frames * window, fft)
        return (spectrum.real.square() + spectrum.imag.square()) @ filters

    def centred(self, waveforms: Tensor, fft: int, hop: int) -> Tensor:
        """Cut waveforms into windows about every `hop`-th sample; mirrored beyond the ends."""
        return pad(waveforms, (fft // 2, fft // 2), mode="reflect").unfold(1, fft, hop)


class _Clap(LogMel):
    read = (
        "feature_size", "fft_window_size", "hop_length", "nb_max_samples", "frequency_min", "frequency_max", "padding",
    )  # fmt: skip

    def __init__(self, extractor: ClapFeatureExtractor) -> None:
        super().__init__(extractor)
        fused = extractor.truncation == "fusion"  # it makes four of a window: here the first, the whole one
        known = fused or extractor.truncation == "rand_trunc"
        if not known or extractor.padding not in ("pad", "repeat", "repeatpad"):
            raise ValueError(
                f'the feature extractor has truncation "{extractor.truncation}" and padding "{extractor.padding}"; '
                'known are "rand_trunc" and "fusion", with "pad", "repeat" or "repeatpad".'
            )
        self.samples, self.padding = int(extractor.nb_max_samples), extractor.padding
        self.fft, self.hop = extractor.fft_window_size, extractor.hop_length
        self.description |= {"truncation": "fusion"} if fused else {}
        self.description |= {"short": "in loops"} if self.padding != "pad" else {}
        filters = torch.as_tensor(extractor.mel_filters if fused else extractor.mel_filters_slaney)
        self.constants = (torch.hann_window(self.fft, dtype=torch.float64), filters)

    def loops(self, samples: int) -> int:
        whole, rest = divmod(self.samples, samples)
        return {"pad": 1, "repeat": whole + bool(rest), "repeatpad": max(1, whole)}[self.padding]

    def _features(self, waveforms: Tensor) -> Tensor:
        waveforms = waveforms.repeat(1, self.loops(waveforms.shape[1]))
        waveforms = pad(waveforms, (0, self.samples - waveforms.shape[1]))  # below 0: cuts
        bands = self.mel(self.centred(waveforms, self.fft, self.hop), self.fft)
        return 10 * bands.clamp_min(1e-10).log10()[:, None]


class Ast(LogMel):
    """Kaldi's filter bank, https://kaldi-asr.org/doc/feat.html, as the extractor sets it."""

    read = ("num_mel_bins", "max_length", "do_normalize", "mean", "std")
    hop, fft, emphasis, floor = 160, 512, 0.97, 1.192092955078125e-07

    def __init__(self, extractor: ASTFeatureExtractor) -> None:
        super().__init__(extractor)
        # Where torchaudio is installed, the extractor has neither window nor filters.
        window = torch.hann_window(400, periodic=False, dtype=torch.float64)
        bins, mel = self.fft // 2 + 1, extractor.num_mel_bins
        filters = mel_filter_bank(bins, mel, 20, self.rate // 2, self.rate, None, "kaldi", True)
        self.constants = (window, torch.as_tensor(filters))
        self.frames = extractor.max_length
        if getattr(extractor, "pads_frames", not hasattr(extractor, "window_seconds")):
            self.after_end = -32768
            self.description["short"] = "empty frames"
        self.samples = (self.frames - 1) * self.hop + len(window)
        self.mean: float = extractor.mean if extractor.do_normalize else 0.0
        self.std: float = 2 * extractor.std if extractor.do_normalize else 1.0

    def _features(self, waveforms: Tensor) -> Tensor:
        size = len(self.constants[0])
        waveforms = pad(waveforms[:, : self.samples], (0, max(0, size - waveforms.shape[1])))
        frames = waveforms.unfold(1, size, self.hop)
        frames = frames - frames.mean(-1, keepdim=True)
        frames = frames - self.emphasis * torch.cat([frames[..., :1], frames[..., :-1]], -1)
        bands = self.mel(frames, self.fft).clamp_min(self.floor).log()
        if self.after_end:  # the extractor has no frames of what follows the end
            at = torch.arange(1, waveforms.shape[1] + 1, device=waveforms.device)
            whole = ((at * (waveforms != self.after_end / 32768)).amax(1, keepdim=True) - size) // self.hop
            is_empty = torch.arange(bands.shape[1], device=bands.device) > whole.clamp_min(0)
            bands = bands.masked_fill(is_empty[..., None], 0.0)
        return (pad(bands, (0, 0, 0, self.frames - bands.shape[1])) - self.mean) / self.std


class Whisper(LogMel):
    """Whisper's log-mel spectrogram of 30 seconds, `[B, mel, frames]`."""

    read = ("feature_size", "n_fft", "hop_length", "n_samples", "padding_value")

    def __init__(self, extractor: WhisperFeatureExtractor) -> None:
        super().__init__(extractor)
        if extractor.dither:
            raise ValueError(f"the feature extractor has a dither of {extractor.dither}, which is random; set 0.")
        self.samples, self.filling = extractor.n_samples, extractor.padding_value
        self.fft, self.hop = extractor.n_fft, extractor.hop_length
        self.constants = (torch.hann_window(self.fft, dtype=torch.float64), torch.as_tensor(extractor.mel_filters))

    def _features(self, waveforms: Tensor) -> Tensor:
        waveforms = pad(waveforms, (0, self.samples - waveforms.shape[1]), value=self.filling)  # below 0: cuts
        bands = self.mel(self.centred(waveforms, self.fft, self.hop)[:, :-1], self.fft).clamp_min(1e-10).log10()
        return ((torch.maximum(bands, bands.amax((1, 2), keepdim=True) - 8) + 4) / 4).transpose(1, 2)


class Raw(LogMel):
    """The samples themselves, with a mean of 0 and a variance of 1 where the extractor sees to that."""

    read = ("do_normalize",)

    def __init__(self, extractor: Wav2Vec2FeatureExtractor) -> None:
        super().__init__(extractor)
        self.normalize = extractor.do_normalize

    def _features(self, waveforms: Tensor) -> Tensor:
        if not self.normalize:
            return waveforms
        variance, mean = torch.var_mean(waveforms, 1, correction=0, keepdim=True)
        return (waveforms - mean) / (variance + 1e-7).sqrt()


SOUND_INPUTS: dict[str, type[LogMel]] = {
    "ClapFeatureExtractor": _Clap,
    "ASTFeatureExtractor": Ast,
    "WhisperFeatureExtractor": Whisper,
    "Wav2Vec2FeatureExtractor": Raw,
}
"""By its feature extractor, what computes the input of a sound tower."""
