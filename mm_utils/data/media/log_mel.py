"""The input of a sound tower, as its own feature extractor computes it, in batches.

Sizes, filters, window, mean and standard deviation are those of the extractor. The sums are done in float64 where the
device has it: in float32, rounding of a loud tone covers what is 100 dB below it, and two devices would not agree.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import ClapFeatureExtractor

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
        """Return what computes the same as a feature extractor of transformers.

        Raises:
            ValueError: if that is not one of those that are known, or it is set in a way that is not.
        """
        if type(feature_extractor) is ClapFeatureExtractor:
            return _Clap(feature_extractor)
        from mm_utils.data.media.sound_inputs import SOUND_INPUTS  # which are subclasses

        name = type(feature_extractor).__name__
        if name not in SOUND_INPUTS:
            raise ValueError(
                f"the feature extractor is a {name}; known are {', '.join(SOUND_INPUTS)}, ClapFeatureExtractor."
            )
        return SOUND_INPUTS[name](feature_extractor)

    @torch.no_grad()
    def __call__(self, waveforms: Tensor) -> Tensor:
        """Return the tower's input, float32, on the device of the waveforms.

        Its shape: AST `[B, frames, mel]`, CLAP `[B, 1, frames, mel]`, Whisper `[B, mel, frames]`, raw `[B, samples]`.
        """
        precision = torch.float32 if waveforms.device.type == "mps" else torch.float64
        self.constants = tuple(each.to(waveforms.device, precision) for each in self.constants)
        parts = waveforms.split(max(1, _MAX_SAMPLES // (self.samples or waveforms.shape[1])))
        with torch.autocast(waveforms.device.type, enabled=False):
            return torch.cat([self._features(part.to(precision)).float() for part in parts])

    def describe(self) -> dict[str, Any]:
        """Return what decides the numbers, equal on every machine: for keys and identities."""
        return dict(self.description)

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
