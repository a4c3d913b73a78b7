"""Join the image side of a whole model with another text tower, such as one of another language.

The image tower and its projection stay as they are and are not trained, so embeddings of images, and indexes of them, stay valid
bit for bit. The text projection is new, and the fusion head too. The result is a `VisionTextDualEncoderModel`, or for CLAP's
sounds a model of this project alone.
"""

import logging
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.models.clap.modeling_clap import ClapProjectionLayer

from mm_utils.model.join import join_backbones
from mm_utils.model.modeling_fusion_dual_encoder import DUAL_ENCODERS, FusionDualEncoderModel
from mm_utils.model.stock import identity_projection

logger = logging.getLogger(__name__)


def with_text_tower(
    model: FusionDualEncoderModel, text_model: PreTrainedModel, text_pooling: str, **head: Any
) -> FusionDualEncoderModel:
    """Return a model with the image side of `model`, frozen, and a new text tower with a new projection.

    Args:
        head: fields of the configuration for the new fusion head.

    Raises:
        ValueError: as in `join_backbones`.
    """
    own: Any = model.config
    projection: Any = model.visual_projection
    made = join_backbones(
        model.vision_model,
        text_model,
        medium=own.medium,
        vision_pooling=own.vision_pooling,
        text_pooling=text_pooling,
        projection_dim=own.projection_dim,
        freeze_batch_norm=own.freeze_batch_norm,
        dual_encoder_type="clap" if isinstance(projection, ClapProjectionLayer) else DUAL_ENCODERS[0],
        **head,
    )
    if isinstance(projection, nn.Identity):  # the stock class has a projection, and a product with ones is exact
        projection = identity_projection(own.projection_dim)
    made.visual_projection = projection
    for part in (made.vision_model, made.visual_projection):
        part.requires_grad_(False)
    logger.info(
        "The image side of the model stays as it is (%s, %d numbers an embedding); its texts are read by a new %s",
        *(own.vision_config.model_type, own.projection_dim, text_model.config.model_type),
    )
    return made
