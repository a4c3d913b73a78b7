"""What the process that others are forked from imports, once for all of them; their garbage collectors walk through none of it."""

# ruff: noqa: F401
import gc

import hypothesis
import transformers.models.bert.modeling_bert
import transformers.models.clip.modeling_clip
import transformers.models.convnext.modeling_convnext
import transformers.models.vision_text_dual_encoder.modeling_vision_text_dual_encoder
import transformers.models.vit.modeling_vit

import scripts.prepare_data
import scripts.pretrain
import tests.distributed.test_signature
import tests.faults.rank_runs

gc.freeze()
