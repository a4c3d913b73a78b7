"""Read and write dual encoders of `transformers`: CLIP, Chinese CLIP, SigLIP, CLAP; a run's folder `dual_encoder/`."""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_MAPPING, AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel, ProcessorMixin
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from mm_utils.model.join import has_bert_pooler, join_backbones, probe
from mm_utils.model.modeling_fusion_dual_encoder import DUAL_ENCODERS, FusionDualEncoderModel
from mm_utils.model.pretrained import complete, cut_texts_at, explained, load_weights, set_outputs


def load_stock(name: str, config: Any, **fields: Any) -> FusionDualEncoderModel:
    """Load a stock model in float32, with its embeddings, temperature and bias.

    Of CLAP's two temperatures, one for each direction, the geometric mean is taken.

    Args:
        fields: fields of the new configuration, such as those of the fusion head.

    Raises:
        ValueError: if the folder lacks weights, or SigLIP's has no tokenizer.
    """
    if config.model_type == "siglip":
        # It pools the last position: its texts are padded to one length, and padding is not masked.
        with explained(f"the tokenizer of {name} is missing or damaged", name):
            tokenizer = complete(AutoTokenizer.from_pretrained(name, trust_remote_code=False))
        length = min(config.text_config.max_position_embeddings, tokenizer.model_max_length)
        side = tokenizer.padding_side
        pad = tokenizer.pad_token_id
        fields["text_padding"] = {"length": length, "side": side, "pad_token_id": pad}
    stock, missing = load_weights(AutoModel, f"{name} holds no model", name, config=config, dtype=torch.float32)
    if missing:
        raise ValueError(
            f"{name} holds no whole {config.model_type}; it lacks {len(missing)} weights, such as {missing[0]}. Choose "
            "another model."
        )
    kind = stock.config.model_type
    bias = getattr(stock, "logit_bias", None)
    text_config = stock.config.text_config
    width = getattr(stock.config, "projection_dim", None) or getattr(text_config, "projection_size", None)
    taken = {
        "dual_encoder_type": kind,
        "vision_pooling": "pooler",
        "text_pooling": "cls" if kind == "chinese_clip" else "pooler",
        "projection_dim": width or text_config.hidden_size,
        "logit_bias_init_value": None if bias is None else bias.item(),
    }
    if kind == "clap":  # it has a batch norm, and a rank's batch is not the global batch
        taken |= {"medium": "sound", "freeze_batch_norm": True}
        tower = stock.audio_model
        scale = (stock.logit_scale_a + stock.logit_scale_t) / 2
    else:
        tower = stock.vision_model
        scale = stock.logit_scale
    model = join_backbones(tower, stock.text_model, **{**taken, **fields})
    if kind != "siglip":
        model.text_projection = stock.text_projection
        model.visual_projection = stock.audio_projection if kind == "clap" else stock.visual_projection
    model.logit_scale = nn.Parameter(scale.detach().squeeze())
    return model


def stock_processor(
    processor: ProcessorMixin, config: Any, text_padding: dict[str, Any] | None = None
) -> ProcessorMixin:
    """Return the processor of the class of a stock `config`, which does what ours does; ValueError if there is none.

    Args:
        processor: ours, which makes central squares.
        text_padding: of our own model, if it reads padding.
    """
    if config.model_type == "clap" and processor.feature_extractor.truncation == "fusion":  # type: ignore[attr-defined]
        raise ValueError("the stock class reads four spectrograms of a sound of a fused CLAP, and this model one")
    if config.model_type in (DUAL_ENCODERS[0], "clap") or type(config) not in PROCESSOR_MAPPING:
        return processor
    tokenizer = processor.tokenizer
    if config.model_type == "siglip":
        tokenizer = copy.deepcopy(tokenizer)
        cut_texts_at(tokenizer, (text_padding or {}).get("length", config.text_config.max_position_embeddings))
        set_outputs(tokenizer, ["input_ids"])
    processor_class: Any = PROCESSOR_MAPPING[type(config)]
    return processor_class(processor.image_processor, tokenizer)


# -- written --------------------------------------------------------------------------------------------------------------


def to_dual_encoder(model: FusionDualEncoderModel) -> PreTrainedModel:
    """Return a stock model of `config.dual_encoder_type` with the same logits, which shares the model's tensors.

    For `VisionTextDualEncoderModel`, a vision config without `hidden_size` (ConvNeXt, MobileNet) gets one, which is all
    that the stock class lacks. That class pools texts by the pooler, so a mean becomes one more layer of the text tower
    (`_mean_as_layer`), if the tower has BERT's layers.

    Raises:
        ValueError: if the stock class cannot express this model, with the reason.
    """
    kind = model.config.dual_encoder_type
    weights = dict(model.state_dict())
    if model.config.projection != "linear":
        raise ValueError(
            f"the stock class has linear projections, and this model --projection {model.config.projection}"
        )
    if model.config.medium != "image" and kind != "clap":
        raise ValueError(f"the stock class reads images, and this model {model.config.medium}s")
    if kind == "clap" and not hasattr(model.config.text_config, "projection_hidden_act"):
        raise ValueError("the stock class has CLAP's own text tower, and this model another")
    configs = {"vision_config": model.vision_model.config.to_dict(), "text_config": model.text_model.config.to_dict()}
    if kind == DUAL_ENCODERS[0]:
        _fit_dual_encoder(model, weights, configs)
    if kind != "siglip":
        configs["projection_dim"] = model.config.projection_dim
        configs["logit_scale_init_value"] = model.config.logit_scale_init_value
    if kind == "clap":  # the names of sounds, and the temperature twice
        configs["audio_config"] = configs.pop("vision_config")
        configs["projection_hidden_act"] = model.config.text_config.projection_hidden_act
        # CLAP states the scale itself
        configs["logit_scale_init_value"] = math.exp(model.config.logit_scale_init_value)
        # 'vision_model.x' -> 'audio_model.x', 'visual_projection.x' -> 'audio_projection.x'
        weights |= {f"audio_{name.partition('_')[2]}": weights[name] for name in weights if name.startswith("vis")}
        # 'logit_scale_a', 'logit_scale_t'
        weights |= {f"logit_scale_{side}": model.logit_scale.detach().clone() for side in "at"}
    stock = AutoModel.from_config(AutoConfig.for_model(kind, **configs))
    # SigLIP's class has a bias; without one in the model it is 0
    weights.setdefault("logit_bias", torch.zeros_like(model.logit_scale))
    stock.load_state_dict({name: weights[name].view_as(v) for name, v in stock.state_dict().items()}, assign=True)
    return stock.train(model.training)


def _fit_dual_encoder(model: FusionDualEncoderModel, weights: dict[str, Tensor], configs: dict[str, Any]) -> None:
    kind = model.text_model.config.model_type
    if type(model.text_model.config) not in MODEL_MAPPING:  # SigLIP's, whose images have a projection now
        raise ValueError(f"the stock class has no text tower of the kind {kind}")
    vision = probe(model.vision_model, "vision")
    if model.config.vision_pooling != "pooler" or vision["pooler_output"].dim() != 2:
        raise ValueError("the stock class takes one pooled vector per image from the vision tower, and here is none")
    configs["vision_config"]["hidden_size"] = model.config.vision_pooled_width
    if model.config.text_pooling != "pooler":
        if model.config.text_pooling != "mean" or not has_bert_pooler(model.text_model):
            raise ValueError("the stock class pools texts by a pooler, and this text tower has none")
        weights |= _mean_as_layer(model)
        configs["text_config"]["num_hidden_layers"] += 1


@torch.no_grad()
def _mean_as_layer(model: FusionDualEncoderModel) -> dict[str, Tensor]:
    """Return weights of a BERT layer, pooler and projection that compute the projected mean.

    With queries and keys of zero, attention is uniform over the unmasked tokens, so the first token receives the values'
    mean. The output matrix maps it to U P mean: P is the trained projection, and U an isometry into the vectors whose
    entries sum to zero, which layer normalisation only scales. The factor `loud` drowns the residual, half of it by
    shrinking the input of the layer, so that float16 does not overflow. The feed-forward part adds nothing, the pooler
    stays where tanh is linear, and U transposed undoes U. The result is P mean up to its length, which the embedding
    does not keep: equal within 1e-5 in fp32.
    """
    width = model.config.text_width
    embed = model.config.projection_dim
    if embed >= width:
        raise ValueError("the stock class needs a projection narrower than the text tower, to pool by the mean")
    loud = 1e3
    quiet = 1e-3
    trained: Any = model.text_projection.weight
    projection = trained.double()
    zero_sum = torch.eye(width, dtype=torch.double, device=projection.device) - 1 / width
    isometry = torch.linalg.qr(zero_sum[:, :embed])[0]  # columns: orthonormal, each summing to zero
    eye = torch.eye(width)
    encoder: Any = model.text_model.encoder
    depth = len(encoder.layer)
    before = encoder.layer[-1].state_dict()
    last = {
        "attention.self.value.weight": loud * eye,
        "attention.output.dense.weight": loud * isometry @ projection,
        "attention.output.LayerNorm.weight": torch.ones(width),
        "output.LayerNorm.weight": torch.ones(width),
    }
    if any(name not in before or before[name].shape != value.shape for name, value in last.items()):
        raise ValueError("the stock class pools texts by a pooler, and this text tower's layers are not BERT's")
    last = {name: torch.zeros_like(value) for name, value in before.items()} | last
    weights = {
        **{f"text_model.encoder.layer.{depth}.{name}": value for name, value in last.items()},
        **{
            f"text_model.encoder.layer.{depth - 1}.{name}": before[name] / loud
            for name in ("output.LayerNorm.weight", "output.LayerNorm.bias")
        },
        "text_model.pooler.dense.weight": quiet * eye,
        "text_model.pooler.dense.bias": torch.zeros(width),
        "text_projection.weight": isometry.T.contiguous(),
    }
    return {name: value.to(trained) for name, value in weights.items()}
