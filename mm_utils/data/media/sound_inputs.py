"""The input of sound towers whose extractors are AST's, Whisper's or Wav2Vec2's, see `mm_utils.data.media.log_mel`."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import ASTFeatureExtractor, WhisperFeatureExtractor
from transformers.audio_utils import mel_filter_bank
from transformers.models.wav2vec2 import Wav2Vec2FeatureExtractor

from mm_utils.data.media.log_mel import LogMel


class Ast(LogMel):
    """Kaldi's filter bank, https://kaldi-asr.org/doc/feat.html, as the extractor sets it."""

    read = ("num_mel_bins", "max_length", "do_normalize", "mean", "std")
    hop, fft, emphasis, floor = 160, 512, 0.97, 1.192092955078125e-07

    def __init__(self, extractor: ASTFeatureExtractor) -> None:
        super().__init__(extractor)
        window: Any = getattr(extractor, "window", None)
        filters: Any = getattr(extractor, "mel_filters", None)
        if filters is None:  # torchaudio is installed: the extractor calls it, and it computes the same at this rate
            if self.rate != 16000:
                raise ValueError(
                    f"the feature extractor has a sampling_rate of {self.rate}; with torchaudio, set 16000."
                )
            bins, mel = self.fft // 2 + 1, extractor.num_mel_bins
            filters = mel_filter_bank(bins, mel, 20, self.rate // 2, self.rate, None, "kaldi", True)
            window = torch.hann_window(400, periodic=False, dtype=torch.float64)
        self.constants = (torch.as_tensor(window), torch.as_tensor(filters))
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
    "ASTFeatureExtractor": Ast,
    "WhisperFeatureExtractor": Whisper,
    "Wav2Vec2FeatureExtractor": Raw,
}
"""By its feature extractor, what computes the input of a sound tower."""
